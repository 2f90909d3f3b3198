# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Real launchers: mpirun of OpenMPI, mpiexec of MPICH, srun, torchrun, and what init_distributed is told by hand."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import run_processes
from ports import free_ports
from printed import run_captured

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
    "impi": [f"{sys.prefix}/impi/bin/mpiexec.hydra", "-n", "2"],  # where tools/setup.sh puts it
    "torchrun": [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone", "--nproc-per-node", "2"],
}


SLURM_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=FORCE
SlurmdParameters=config_overrides
"""


@pytest.fixture(scope="module")
def slurm():
    """A cluster of this one host, with its own keys, ports and folders; gone with the tests."""
    programs = ("munged", "slurmctld", "slurmd", "srun")
    if os.geteuid() != 0 or not all(shutil.which(program) for program in programs):
        pytest.skip("a SLURM of our own needs root and the packages slurmctld, slurmd, slurm-client and munge")
    folder = Path(tempfile.mkdtemp(prefix="deeptide-slurm-"))
    folder.chmod(0o755)  # munge insists on it
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(SLURM_CONFIGURATION.format(host=host, folder=folder, ports=free_ports(2)))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    files["seed-file"] = "munge.seed"
    munged = ["munged", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    try:
        for command in (munged, ["slurmctld"], ["slurmd", "-N", host]):
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
        deadline = time.monotonic() + 30
        while b"idle" not in subprocess.run(["sinfo", "-h"], env=environment, capture_output=True, timeout=30).stdout:
            assert time.monotonic() < deadline, "SLURM does not come up"
            time.sleep(0.2)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)


def package_path():
    return os.pathsep.join([os.path.dirname(os.path.dirname(deeptide.__file__)), os.environ.get("PYTHONPATH", "")])


def launch(name, script, free_port, **environment):
    command = LAUNCHERS[name]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    python = [] if name == "torchrun" else [sys.executable]
    variables = {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", "TEST_PORT": str(free_port), **environment}
    return run_captured([*command, *python, str(script)], env={**os.environ, **variables}, timeout=120)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def free_port():
    return free_ports(1)[0]


@pytest.mark.costly
@pytest.mark.parametrize("token", ["", "secret"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_needs_no_further_settings(name, token, script, free_port):
    done = launch(name, script, free_port, DEEPTIDE_JOB_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 2 0 3", "1 2 1 3"]


@pytest.mark.costly
@pytest.mark.parametrize("options", [[], ["--mpi=pmi2"]])
def test_srun_needs_no_further_settings(options, slurm, script):
    command = ["srun", *options, "-n", "2", sys.executable, str(script)]
    variables = {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", **slurm}
    done = run_captured(command, env={**os.environ, **variables}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 2 0 3", "1 2 1 3"]


@pytest.mark.slow
def test_batch_script_without_srun_is_a_world_of_one(slurm, tmp_path):
    batch = tmp_path / "batch.sh"
    code = (
        "import torch.distributed as d, deeptide; deeptide.init_distributed(); print('alone', not d.is_initialized())"
    )
    batch.write_text(f'#!/bin/sh\n{sys.executable} -c "{code}"\n')
    command = ["sbatch", "--wait", "-n", "2", "-o", str(tmp_path / "out"), str(batch)]
    variables = {"PYTHONPATH": package_path(), **slurm}
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "out").read_text() == "alone True\n"


@pytest.mark.costly
@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_launcher_that_contradicts_the_environment_is_named(name, script, free_port):
    done = launch(name, script, free_port, RANK="0", WORLD_SIZE="5", MASTER_ADDR="127.0.0.1", MASTER_PORT="1234")
    assert done.returncode != 0
    assert "two launchers describe different worlds" in done.stderr
    assert "environment: RANK=0, WORLD_SIZE=5" in done.stderr
    assert f"{'mpich' if name == 'impi' else name}: " in done.stderr  # Intel's variables are MPICH's


def join(token, folder):
    open(os.path.join(folder, os.environ["RANK"]), "w").close()
    while len(os.listdir(folder)) < 2:  # the timeout is for the meeting, not for the processes' start
        time.sleep(0.01)
    os.environ["DEEPTIDE_JOB_TOKEN"] = token if os.environ["RANK"] == "0" else "guess"
    deeptide.init_distributed(timeout=timedelta(seconds=3))


def meet(init_method):
    import torch
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ[f"TEST_{name}"] = os.environ.pop(name, "")
    rank = int(os.environ["TEST_RANK"])
    deeptide.init_distributed(init_method=init_method, rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    assert os.environ["WORLD_SIZE"] == "2"
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_meet_where_init_method_says(kind, free_port, tmp_path):
    run_processes(
        2, meet, f"tcp://127.0.0.1:{free_port}" if kind == "tcp" else f"file://{tmp_path}/meeting", timeout=60
    )


@pytest.mark.costly
def test_rank_with_another_token_is_refused(tmp_path):
    done = run_processes(2, join, "secret", str(tmp_path), check=False, timeout=60)
    assert [one.returncode for one in done] == [1, 1]
    assert "CommError: rank 1 (this process) and rank 0 hold different job tokens" in done[1].stderr
    assert "missing: rank 1" in done[0].stderr


def test_arguments_are_checked(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(deeptide.ConfigError, match="give both"):
        deeptide.init_distributed(rank=1)
    with pytest.raises(deeptide.ConfigError, match="expected 0 <= rank < world_size"):
        deeptide.init_distributed(rank=2, world_size=2)
    with pytest.raises(deeptide.ConfigError, match="dist_init_required is false"):
        deeptide.init_distributed(dist_init_required=False)
    with pytest.raises(deeptide.ConfigError, match="expected tcp://HOST:PORT, file://PATH or env://"):
        deeptide.init_distributed(init_method="mpi://", rank=0, world_size=1)
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
