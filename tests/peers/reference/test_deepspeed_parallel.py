# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed 0.19.8's pipelines and tensor-parallel ranks, made here and now, are read and go on.

GOLDEN=1 also writes them to tests/python/checkpoint/golden_deepspeed_parallel.tar.xz, which CI's tests read.
"""

import os
from pathlib import Path

import pytest
from conftest import ranks
from parallel_here import go_on_in_pipeline, load_tensors
from parallel_runs import PIPELINES, TENSORS
from test_deepspeed_checkpoints import run_deepspeed, write_golden

GOLDEN = Path(__file__).parents[2] / "python" / "checkpoint" / "golden_deepspeed_parallel.tar.xz"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder of checkpoints by case, of two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_deepspeed("deepspeed_parallel_rank.py", folder, folder)
    if os.environ.get("GOLDEN") == "1":
        write_golden(folder, GOLDEN)
    return folder


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "pipeline-0-fp32-tied"])
def test_pipelines_go_on(checkpoints, name):
    ranks.run_ranks(2, go_on_in_pipeline, str(checkpoints), name, 2, 1e-4 if "fp32" in name else 2e-2)


@pytest.mark.parametrize("name", TENSORS)
def test_slices_are_joined(checkpoints, name):
    ranks.run_ranks(1, load_tensors, str(checkpoints), name, 2)
