# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's pipelines and tensor-parallel ranks: states are equal, and a pipeline's run goes on.

golden_deepspeed_parallel.tar.xz holds checkpoints of DeepSpeed 0.19.8 itself, two ranks on a CPU; of tensor-parallel
ranks beside them what its own ds_to_universal made. deepspeed_parallel_rank.py in tests/peers/reference wrote it.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from golden import unpack
from parallel_here import go_on_in_pipeline, load_tensors
from parallel_runs import PIPELINES, TENSORS, make_llama

import deeptide

GOLDEN = Path(__file__).parents[1] / "golden_deepspeed_parallel.tar.xz"
# Sums in another order, by another machine's kernels, which Adam's first steps enlarge.
# In bf16 one rounding is 4e-3 of a value.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
UNNAMED = "pipeline-0-fp32-tied"


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    return unpack(GOLDEN, tmp_path_factory.mktemp("golden_parallel"))


def tolerance_of(name):
    return TOLERANCE[name.split("-")[2]]


@pytest.mark.costly
@pytest.mark.parametrize("name", [name for name in PIPELINES if name != UNNAMED])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipelines_run_moves_over(golden, name, stages):
    run_ranks(stages, go_on_in_pipeline, str(golden), name, stages, tolerance_of(name))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
def test_slices_of_tensors_are_joined(golden, name, world, stage):
    make_llama()  # imports Transformers before threads do
    run_ranks(world, load_tensors, str(golden), name, stage)
    run_ranks(world, load_tensors, str(golden), name, stage, "middle_universal")


@pytest.mark.parametrize("name", ["pipeline-1-fp32-tied", "tensor-2-bf16"])
def test_the_import_of_one_is_a_checkpoint_of_ours(golden, tmp_path, name):
    made = Path(deeptide.import_checkpoint(golden / name / "middle", tmp_path / name))
    assert made == tmp_path / name / "middle"
    assert deeptide.checkpoint.verify(tmp_path / name) == []
    shutil.copy(golden / name / "expected.pt", tmp_path / name)
    if name in PIPELINES:
        run_ranks(2, go_on_in_pipeline, str(tmp_path), name, 2, tolerance_of(name), None)
    else:
        make_llama()
        run_ranks(2, load_tensors, str(tmp_path), name, 2, None)


def import_error(folder, tmp_path):
    with pytest.raises(deeptide.CheckpointError) as caught:
        deeptide.import_checkpoint(folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    return str(caught.value)


def test_ties_without_names_are_refused(golden, tmp_path):
    text = import_error(golden / UNNAMED / "middle", tmp_path)
    assert "does not say which parameter each of its optimizer's states is of" in text


@pytest.mark.parametrize(
    ("name", "files", "text"),
    [
        ("pipeline-1-fp32", "*mp_rank_01*", "is of 2 pipeline stages and 1 tensor-parallel ranks, and lacks files"),
        ("tensor-1-fp32", "*mp_rank_01*", "is of 1 pipeline stages and 2 tensor-parallel ranks, and lacks files"),
        ("tensor-3-fp32", "zero_pp_rank_0_mp_rank_01_optim*", "elements of"),
    ],
)
def test_files_that_are_missing_are_told(golden, tmp_path, name, files, text):
    folder = tmp_path / name
    shutil.copytree(golden / name / "middle", folder)
    for path in folder.glob(files):
        path.unlink()
    assert text in import_error(folder, tmp_path)


def refused(golden, tmp_path, change):
    """The error for a checkpoint whose universal_checkpoint_info was changed."""
    folder = tmp_path / "changed"
    shutil.copytree(golden / "tensor-1-fp32" / "middle", folder)
    for path in folder.glob("mp_rank_*"):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    return import_error(folder, tmp_path)


def test_slices_are_refused_by_name_where_nothing_says_how_they_join(golden, tmp_path):
    text = refused(golden, tmp_path, lambda state: state.pop("universal_checkpoint_info"))
    assert "cannot join what 2 tensor-parallel ranks have of '" in text
    assert "it has no universal_checkpoint_info" in text


def test_values_that_are_averages_are_refused_by_name(golden, tmp_path):
    def change(state):
        state["universal_checkpoint_info"]["parameter_to_average_patterns"] = [r".*input_layernorm\.weight"]

    text = refused(golden, tmp_path, change)
    assert "'model.layers.0.input_layernorm.weight'" in text
    assert "it is the average" in text


def test_a_map_that_patterns_do_not_give_is_refused_by_name(golden, tmp_path):
    def change(state):
        for pattern, entry in state["universal_checkpoint_info"]["affine_map"]["params"].items():
            if "down_proj" in pattern:
                entry["ranks"][1]["pieces"][0]["scale"] = 0.5

    text = refused(golden, tmp_path, change)
    assert "down_proj.weight'" in text
    assert "affine_map" in text
