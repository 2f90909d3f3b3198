# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's options that only several hosts show at work."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import DEEPTIDE
from test_faults import rank_pids
from test_training import ENVIRONMENT

# Not a shell: one that has a `sleep` started by vfork(2), and stopped before its exec(2), waits for it and never shows
# as stopped.
TICK = """
import itertools, os, time
print("ready", os.getpid(), flush=True)
for i in itertools.count(1):
    print("tick", os.environ["RANK"], i, flush=True)
    time.sleep(0.1)
"""


def states(pids):
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def wait_until(condition, what, timeout=10):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_suspended_job_stops_everywhere_and_goes_on(hosts, launcher):
    """^Z and fg, for longer than the hosts may be silent."""
    if not shutil.which(launcher):
        pytest.skip(f"{launcher} is not installed")
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    words = ["--launcher", launcher, "--heartbeat_timeout", "1", sys.executable, "-c", TICK]
    job = hosts.start(*words, ssh=launcher == "ssh", env=env)
    job.wait_for("tick", 8)
    pids = rank_pids(job).values()
    job.signal(signal.SIGTSTP)
    wait_until(lambda: states([job.process.pid, *pids]) == {"T"}, "not all have stopped")
    time.sleep(2.5)
    assert states(pids) == {"T"}
    job.signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states([job.process.pid, *pids]), "not all go on")
    last = max(int(n) for n in re.findall(r"tick 3 (\d+)", job.output))
    job.wait_for(f"tick 3 {last + 5}\n", timeout=10)
    assert job.process.poll() is None, job.errors
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.errors
    hosts.expect_nothing_left()


def test_the_pid_file_names_the_launcher_and_goes_with_it(hosts):
    job = hosts.start("--save_pid", "sh", "-c", "echo ready; sleep 1000", slots=(1, 1))
    job.wait_for("ready", 2)
    path = Path(tempfile.gettempdir()) / f"{job.process.pid}.deepspeed"
    assert path.read_text() == str(job.process.pid)
    os.kill(int(path.read_text()), signal.SIGTERM)  # what its users do with it
    assert job.wait() == 143, job.errors
    assert not path.exists()
    hosts.expect_nothing_left()


def cores_of(job):
    return dict(re.findall(r"\[rank (\d)\] (\S+) ", job.output))


def test_cores_are_shared_out_on_each_host(hosts):
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one core cannot be shared out")
    show = ["sh", "-c", "echo $(sed -n 's/Cpus_allowed_list:\t//p' /proc/self/status) $OMP_NUM_THREADS"]
    job = hosts.run("--bind_cores_to_rank", "--bind_core_list", f"{usable[0]},{usable[1]}", *show)
    assert job.code == 0, job.errors
    first, second = map(str, usable[:2])
    assert cores_of(job) == {"0": first, "1": second, "2": first, "3": second}, job.output
    assert all(line.endswith(" 1") for line in job.output.splitlines()), job.output  # threads as cores
    job = hosts.run("--bind_cores_to_rank", "--bind_core_list", "4000", "true")
    assert job.code == 2 and "host worker-" in job.errors
    assert "--bind_core_list: core 4000 is not available here; available cores:" in job.errors
    job = hosts.run("--bind_cores_to_rank", "true", slots=(1, 4096))
    assert job.code == 2 and "host worker-2: --bind_cores_to_rank needs at least one core per rank: 4096" in job.errors


def test_a_venv_script_chooses_the_python(hosts):
    folder = hosts.folder / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").write_text(f'#!/bin/sh\nFROM_VENV=1 exec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    (folder / "activate").write_text(f"export PATH={folder}:$PATH\n")
    script = hosts.folder / "show.py"
    script.write_text("import os\nprint('venv', os.environ.get('FROM_VENV'))\n")
    job = hosts.run("--venv_script", folder / "activate", script, slots=(1, 1))
    assert job.code == 0, job.errors
    assert job.output.count("venv 1") == 2, job.output
    job = hosts.run("--venv_script", hosts.folder / "missing", script, slots=(1, 1))
    assert job.code == 255 and "missing" in job.errors, job.errors


SUM = """
import torch, torch.distributed as dist, deeptide
deeptide.init_distributed()
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""


def test_two_parts_started_by_hand_are_one_job(hosts):
    hostfile = hosts.network.hostfile(2, 2)
    script = hosts.python("sum.py", SUM)
    env = {**hosts.environment, **ENVIRONMENT}
    parts = []
    for node, host in enumerate(hosts.workers[:2]):
        words = [DEEPTIDE, "-H", hostfile, "--no_ssh", "--node_rank", node, "--master_addr", "10.83.0.2", *script]
        parts.append(
            subprocess.Popen(host.command(*words), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for node, part in enumerate(parts):
        out, errors = part.communicate(timeout=120)
        assert part.returncode == 0, errors
        assert sorted(out.splitlines()) == [f"[rank {2 * node}] sum 10", f"[rank {2 * node + 1}] sum 10"], errors
    hosts.expect_nothing_left()


SCRIPT = """
import argparse, torch, torch.distributed as dist, deeptide
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deeptide.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
engine, _, _, _ = deeptide.initialize(args=args, model=model)
loss = engine(torch.ones(2, 4)).square().mean()
engine.backward(loss)
engine.step()
print("trained", args.deepspeed, args.deepspeed_mpi, engine.world.rank, engine.world.size, args.local_rank, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["ssh", "openmpi"])
def test_a_script_of_deepspeeds_users_runs_unchanged(hosts, launcher):
    (hosts.folder / "ds_config.json").write_text(
        '{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}'
    )
    words = [*hosts.python("train.py", SCRIPT), "--deepspeed", "--deepspeed_config", "ds_config.json"]
    mpi = launcher != "ssh"
    if mpi:
        job = hosts.run_mpi(launcher, *words, "--deepspeed_mpi", slots=(1, 1), more=ENVIRONMENT)
    else:
        job = hosts.run(*words, slots=(1, 1), env=ENVIRONMENT)
    assert job.code == 0, job.errors
    trained = sorted(line for line in job.output.splitlines() if "trained" in line)
    assert trained == [f"[rank {rank}] trained True {mpi} {rank} 2 0" for rank in range(2)], job.output
    hosts.expect_nothing_left()
