# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts of Trainer, Accelerate, PEFT and TRL beside the same scripts under DeepSpeed 0.19.8 itself: their losses."""

import json
import os
import subprocess
from pathlib import Path

import libraries
import pytest
import test_peft
import test_trl
from conftest import run_processes
from ports import free_ports
from test_deepspeed import THEIRS

STAGES, ACCUMULATIONS = (0, 2, 3), (1, 3)
# By name: the script, how ranks are run here, and arguments after (folder, name, stage, gas).
SCRIPTS = {
    "trainer": (libraries.run_trainer, run_processes, ()),
    "accelerate": (libraries.run_accelerate, run_processes, ()),
    "lora-trainer": (test_peft.check_trainer, run_processes, ()),
    "lora-accelerate": (test_peft.check_accelerate, run_processes, ()),
    "sft": (test_trl.check_sft, test_trl.run_processes, ()),
    "dpo": (test_trl.check_dpo, test_trl.run_processes, (False,)),
}


def case_of(name, stage, gas, folder, port):
    script, _, more = SCRIPTS[name]
    own = folder / f"{name}-{stage}-{gas}"
    own.mkdir()
    return {
        "module": script.__module__,
        "function": script.__name__,
        "arguments": [str(own), "theirs", stage, gas, *more],
        "port": port,
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder in which DeepSpeed's runs have written, and what its ranks have said."""
    if not (THEIRS / "bin" / "python").exists():
        pytest.skip(f"there is no {THEIRS.name}: tests/peers/run.sh makes it")
    folder = tmp_path_factory.mktemp("theirs")
    grid = [(name, stage, gas) for name in SCRIPTS for stage in STAGES for gas in ACCUMULATIONS]
    ports = free_ports(len(grid))
    cases = [case_of(*which, folder, port) for which, port in zip(grid, ports, strict=True)]
    (folder / "cases.json").write_text(json.dumps(cases))
    peers = Path(__file__).parents[1]
    packages = next((peers.parents[1] / ".venv-peers" / "lib").glob("python*/site-packages"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [peers, peers.parent / "python", os.environ["PYTHONPATH"], packages])),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(THEIRS / "torch_extensions"),
    }
    program = Path(__file__).with_name("deepspeed_scripts_rank.py")
    words = [str(THEIRS / "bin" / "python"), str(program), str(folder / "cases.json")]
    ranks = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("w") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(words, stdout=log, stderr=log, env=own, cwd=folder))
    try:
        for rank in ranks:
            rank.wait(timeout=3600)  # DeepSpeed compiles its operators the first time
    finally:
        for rank in ranks:
            rank.kill()
    return folder, "\n".join((folder / f"{rank}.log").read_text()[-5000:] for rank in range(2))


@pytest.mark.parametrize("gas", ACCUMULATIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_deepspeeds_losses(name, stage, gas, theirs, tmp_path):
    folder, said = theirs
    wrote = folder / f"{name}-{stage}-{gas}" / "theirs.json"
    assert wrote.exists(), said
    script, run, more = SCRIPTS[name]
    run(2, script, str(tmp_path), "here", stage, gas, *more)
    expected, here = json.loads(wrote.read_text()), libraries.read(tmp_path, "here")
    kinds = [kind for kind in ("loss", "eval", "grad_norm") if expected.get(kind)]  # stage 0: no norm
    assert len(expected["loss"]) == len(here["loss"]) > 1
    libraries.check_equal(
        {kind: here[kind] for kind in kinds}, {kind: expected[kind] for kind in kinds}, len(here["loss"])
    )
