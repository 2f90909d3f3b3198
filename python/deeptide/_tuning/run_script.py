# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a training script within a rank that one of Deeptide's commands has prepared."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run_script(script: str, arguments: list[str], as_module: bool) -> None:
    """Runs the script, or the module, as the interpreter itself would."""
    sys.argv = [script, *arguments]
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
