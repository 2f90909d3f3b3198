# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of DeepSpeed go on here whatever setting changed what their checkpoints hold; what does not fit is refused.

golden_deepspeed_settings.tar.xz holds checkpoints of DeepSpeed 0.19.8 itself, made as those of test_moved_runs.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from golden import unpack
from moved_here import check_losses, go_on, precision_of, start
from moved_settings import SETTINGS

import deeptide
from deeptide import checkpoint

GOLDEN = Path(__file__).parents[1] / "golden_deepspeed_settings.tar.xz"
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 5e-4}


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    return unpack(GOLDEN, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_moves_over_with_every_setting(settings, name):
    tolerance = TOLERANCE[precision_of(name)]
    losses = run_ranks(2, go_on, str(settings), name, int(name[5]), "middle", tolerance)
    check_losses(losses, settings, name, tolerance, first=1e-6)


def load(world, folder, name):
    start(world, name, 1).load_checkpoint(str(folder), tag="middle")


def test_masters_of_other_parameters_are_refused_by_name(settings, tmp_path):
    shutil.copytree(settings / "stage2-robin-bf16", tmp_path / "run")
    path = tmp_path / "run" / "middle" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    module = state["module"]
    one, other = "blocks.0.inner.weight", "blocks.1.inner.weight"
    module[one], module[other] = module[other], module[one]
    torch.save(state, path)
    with pytest.raises(
        deeptide.CheckpointError, match=r"master of 'blocks\.[01]\.inner\.weight' .* expected what rounds"
    ):
        run_ranks(1, load, str(tmp_path / "run"), "stage2-robin-bf16")


@pytest.mark.parametrize("name", ["stage2-robin-groups", "stage3-sub-groups", "stage2-robin-bf16"])
def test_whole_weights_are_read_from_deepspeeds_folder(settings, name):
    from deeptide.as_deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(settings / name, tag="middle")
    expected = torch.load(settings / name / "expected.pt")["middle"]
    for key, theirs in expected.items():
        parameter, _, role = key.rpartition("/")
        if role == "master":
            assert torch.equal(weights[parameter].to(theirs.dtype), theirs), key
    assert torch.equal(weights["gain"].float(), torch.tensor([0.75, 1.25, 1.0]))
    assert weights["shift"].dtype == torch.float32
    reader = checkpoint.open(settings / name)
    assert reader.global_steps == 5
