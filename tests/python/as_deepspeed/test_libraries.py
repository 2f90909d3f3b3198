# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers' Trainer and a loop of Accelerate's, through the interface and under DDP; tests/peers has the rest."""

import libraries
import pytest
from conftest import run_processes


@pytest.mark.slow
@pytest.mark.parametrize("script", [libraries.run_trainer, libraries.run_accelerate])
def test_a_library_learns_as_under_ddp_when_windows_are_short(script, tmp_path):
    for name, stage in (("plain", None), ("whole", 0), ("sharded", 3)):
        run_processes(2, script, str(tmp_path), name, stage, 3, preload=libraries.PRELOAD)
    plain = libraries.read(tmp_path, "plain")
    for name in ("whole", "sharded"):
        libraries.check_equal(libraries.read(tmp_path, name), plain, 4 if script is libraries.run_trainer else 10)
