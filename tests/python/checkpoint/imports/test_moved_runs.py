# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that begin under DeepSpeed go on here: weights, states, counts, schedule, and ten further steps.

golden_deepspeed.tar.xz holds checkpoints of DeepSpeed 0.19.8 itself, two ranks on a CPU, and what its next ten steps
gave; deepspeed_checkpoint_rank.py wrote it, test_deepspeed_checkpoints.py makes them anew: tests/peers/reference.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_ranks
from golden import unpack
from moved_here import check_losses, go_on, precision_of
from moved_runs import CASES

import deeptide

GOLDEN = Path(__file__).parents[1] / "golden_deepspeed.tar.xz"
# Sums in another order, by another machine's kernels. In 16 bits one rounding of a parameter is 4e-3 of it.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 2e-4}


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    return unpack(GOLDEN, tmp_path_factory.mktemp("golden"))


def check(world, folder, name, stage, tag):
    tolerance = TOLERANCE[precision_of(name)]
    losses = run_ranks(world, go_on, str(folder), name, stage, tag, tolerance)
    check_losses(losses, folder, name, tolerance, first=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "universal" not in name])
def test_a_run_moves_over_in_its_middle(golden, name):
    check(2, golden, name, int(name[5]), "middle")


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", ["stage2-bf16", "stage3-fp32"])
def test_into_any_world_and_stage(golden, name, world, stage):
    if world == 3:
        name = "stage3-bf16"  # its ranks all see one batch
    check(world, golden, name, stage, "middle")


@pytest.mark.parametrize("name", ["stage1-groups", "stage2-universal", "stage3-universal"])
def test_the_universal_form(golden, name):
    check(2, golden, name, int(name[5]), "middle_universal")


@pytest.mark.parametrize("name", ["stage1-fp16", "stage3-bf16", "stage2-universal"])
def test_an_imported_checkpoint_is_one_of_ours(golden, tmp_path, name):
    source = golden / name
    made = Path(deeptide.import_checkpoint(source, tmp_path / name))
    assert made.name == ("middle_universal" if "universal" in name else "middle")
    assert (tmp_path / name / "latest").read_text().strip() == made.name
    assert {path.name for path in made.iterdir()} >= {"manifest.json", "rank_00000.safetensors"}
    (tmp_path / name / "expected.pt").write_bytes((source / "expected.pt").read_bytes())
    check(2, tmp_path, name, 2, None)


@pytest.mark.costly
def test_the_command_says_what_it_cannot_read(golden, tmp_path):
    words = [shutil.which("deeptide"), "checkpoint", "import"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # where the command finds the python to run
    how = {"capture_output": True, "text": True, "env": {**os.environ, "PATH": path}}
    done = subprocess.run([*words, golden / "stage2-fp32", tmp_path / "a", "--as", "moved"], **how)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "a" / "moved"))
    broken = tmp_path / "broken" / "middle"
    shutil.copytree(golden / "stage2-fp32" / "middle", broken)
    (broken / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    done = subprocess.run([*words, broken.parent, tmp_path / "b", "-t", "middle"], **how)
    assert done.returncode == 1
    assert "lacks the file of data-parallel rank 0" in done.stderr
    (broken / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(broken / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    done = subprocess.run([*words, broken.parent, tmp_path / "b", "-t", "middle"], **how)
    assert "is of 2 data-parallel ranks and has the files of 1" in done.stderr
    assert not (tmp_path / "b").exists()
