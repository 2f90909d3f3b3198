# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes forked from one that has loaded the libraries, and the same scripts on plain torch beside them."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest

_PYTHON_TESTS = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(_PYTHON_TESTS))
import libraries  # noqa: E402

_spec = importlib.util.spec_from_file_location("ranks", _PYTHON_TESTS / "conftest.py")
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

# Ranks find the modules of this folder and of the one about Megatron.
_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent / "mpu")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")])
# Arrow's allocator must start no thread in the process that forks the ranks.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

run_ranks = ranks.run_ranks
run_processes = functools.partial(ranks.run_processes, preload=(*libraries.PRELOAD, "peft"))


@pytest.fixture(scope="session")
def beside_plain(tmp_path_factory):
    """Runs a script here at a stage and, once per session, on plain torch; compares what they wrote.

    here: another way to run it here, and another script.
    """
    plain = tmp_path_factory.mktemp("plain")

    def compare(script, folder, stage, steps, *args, run=run_processes, here=None):
        name = "-".join([script.__module__, script.__name__, *map(str, args)])
        if not (plain / f"{name}.json").exists():
            run(2, script, str(plain), name, None, *args)
        run_here, script_here = here or (functools.partial(run, 2), script)
        run_here(script_here, str(folder), "here", stage, *args)
        libraries.check_equal(libraries.read(folder, "here"), libraries.read(plain, name), steps)
        return plain / name

    return compare
