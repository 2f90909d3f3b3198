# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A run moves to DeepSpeed 0.19.8 in its middle: our checkpoint, exported to the universal layout, goes on there."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deeptide
from deeptide import checkpoint

THEIRS = Path(__file__).parents[3] / ".venv-peers-deepspeed"


def run(framework, python, stage, load, save, folder, ranks):
    """Runs ranks of universal_rank.py; returns what the first has seen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = folder / f"{framework}-{stage}.pt"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(deeptide.__file__).absolute().parents[1]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(THEIRS / "torch_extensions"),
    }
    words = [python, Path(__file__).parent / "universal_rank.py", framework, stage, load, save, out]
    processes = []
    for rank in range(ranks):
        with (folder / f"{framework}-{stage}-{rank}.log").open("w") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, env=own, cwd=folder))
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = [(folder / f"{framework}-{stage}-{rank}.log").read_text()[-3000:] for rank in range(ranks)]
        pytest.fail(f"{framework} ended with {codes}:\n" + "\n".join(logs))
    return torch.load(out)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_from_an_export(tmp_path, stage):
    if not (THEIRS / "bin" / "python").exists():
        pytest.skip(f"there is no {THEIRS.name}: tests/peers/run.sh makes it")
    saved = run("deeptide", sys.executable, stage, "", tmp_path / "run", tmp_path, 2)
    checkpoint.export(tmp_path / "run", tmp_path / "universal", "universal")
    ours = run("deeptide", sys.executable, stage, tmp_path / "run", "", tmp_path, 2)
    theirs = run("deepspeed", THEIRS / "bin" / "python", stage, tmp_path / "universal", "", tmp_path, 2)
    assert theirs["steps"] == ours["steps"] == 10
    for name, roles in saved["saved"].items():
        for role, value in roles.items():
            assert torch.equal(theirs["loaded"][name][role], value), f"{name} {role}"
    assert theirs["lr"] == pytest.approx(ours["lr"], rel=1e-9)
    # Sums in another order.
    for step, (one, other) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1):
        assert math.isclose(one, other, rel_tol=1e-5), f"step {step}: {one}, DeepSpeed {other}"
