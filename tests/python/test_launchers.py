# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Real launchers: mpirun of OpenMPI, mpiexec of MPICH, torchrun, and what init_distributed is told by hand."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest
from conftest import run_processes

import deeptide

SCRIPT = """
import os, sys, torch, torch.distributed as dist, deeptide
deeptide.init_distributed(distributed_port=int(os.environ.pop("TEST_PORT", 29500)))
deeptide.init_distributed()  # the second call finds all done
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
sys.stdout.write(" ".join([*variables, str(int(total.item()))]) + "\\n")
dist.destroy_process_group()
"""

LAUNCHERS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.mpich", "-n", "2"],
    "torchrun": [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone", "--nproc-per-node", "2"],
}


def package_path():
    return os.pathsep.join([os.path.dirname(os.path.dirname(deeptide.__file__)), os.environ.get("PYTHONPATH", "")])


def launch(name, script, free_port, **environment):
    command = LAUNCHERS[name]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    python = [] if name == "torchrun" else [sys.executable]
    variables = {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", "TEST_PORT": str(free_port), **environment}
    return subprocess.run(
        [*command, *python, str(script)], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("token", ["", "secret"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_needs_no_further_settings(name, token, script, free_port):
    done = launch(name, script, free_port, DEEPTIDE_JOB_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 2 0 3", "1 2 1 3"]


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_launcher_that_contradicts_the_environment_is_named(name, script, free_port):
    done = launch(name, script, free_port, RANK="0", WORLD_SIZE="5", MASTER_ADDR="127.0.0.1", MASTER_PORT="1234")
    assert done.returncode != 0
    assert "two launchers describe different worlds" in done.stderr
    assert "environment: RANK=0, WORLD_SIZE=5" in done.stderr
    assert f"{name}: " in done.stderr


def join(token):
    os.environ["DEEPTIDE_JOB_TOKEN"] = token if os.environ["RANK"] == "0" else "guess"
    deeptide.init_distributed(timeout=timedelta(seconds=3))


def test_rank_with_another_token_is_refused():
    done = run_processes(2, join, "secret", check=False, timeout=60)
    assert [one.returncode for one in done] == [1, 1]
    assert "CommError: this rank 1 and rank 0 hold different job's tokens" in done[1].stderr
    assert "missing: rank 1" in done[0].stderr


def test_arguments_are_checked(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(deeptide.ConfigError, match="give both"):
        deeptide.init_distributed(rank=1)
    with pytest.raises(deeptide.ConfigError, match="expected 0 <= rank < world_size"):
        deeptide.init_distributed(rank=2, world_size=2)
    with pytest.raises(deeptide.ConfigError, match="dist_init_required is False"):
        deeptide.init_distributed(dist_init_required=False)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "ten")
    with pytest.raises(deeptide.ConfigError, match="DEEPSPEED_TIMEOUT=ten"):
        deeptide.init_distributed(rank=0, world_size=1)


def test_nothing_happens_without_a_launcher(monkeypatch):
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    deeptide.init_distributed()
    assert not dist.is_initialized()


def test_mpi_is_left_alone_without_auto_mpi_discovery(monkeypatch):
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    deeptide.init_distributed(auto_mpi_discovery=False)
    assert not dist.is_initialized()
