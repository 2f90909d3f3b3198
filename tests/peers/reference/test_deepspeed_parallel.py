# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed 0.19.8's pipelines and tensor-parallel ranks, made here and now, are read and go on.

GOLDEN=1 also writes them to tests/python/checkpoint/golden_deepspeed_parallel.tar.xz, which CI's tests read.
"""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from conftest import ranks
from parallel_here import go_on_in_pipeline, load_tensors
from parallel_runs import PIPELINES, TENSORS
from test_deepspeed_checkpoints import THEIRS, write_golden

GOLDEN = Path(__file__).parents[2] / "python" / "checkpoint" / "golden_deepspeed_parallel.tar.xz"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder of checkpoints by case, of two ranks."""
    python = THEIRS / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {THEIRS.name}: tests/peers/run.sh makes it")
    folder = tmp_path_factory.mktemp("checkpoints")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(THEIRS / "torch_extensions"),
    }
    words = [str(python), str(Path(__file__).parent / "deepspeed_parallel_rank.py"), str(folder)]
    processes = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("w") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(words, stdout=log, stderr=log, env=own, cwd=folder))
    try:
        codes = [process.wait(timeout=1800) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if codes != [0, 0]:
        pytest.fail(f"DeepSpeed ended with {codes}:\n" + (folder / "0.log").read_text()[-3000:])
    if os.environ.get("GOLDEN") == "1":
        write_golden(folder, GOLDEN)
    return folder


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "pipeline-0-fp32-tied"])
def test_pipelines_go_on(checkpoints, name):
    ranks.run_ranks(2, go_on_in_pipeline, str(checkpoints), name, 2, 1e-4 if "fp32" in name else 2e-2)


@pytest.mark.parametrize("name", TENSORS)
def test_slices_are_joined(checkpoints, name):
    ranks.run_ranks(1, load_tensors, str(checkpoints), name, 2)
