# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trainings over hosts that hang: one report, which names who is late, and where."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import ClassVar

import pytest
from conftest import DEEPTIDE

deeptide = pytest.importorskip("deeptide")
PACKAGES = Path(deeptide.__file__).absolute().parents[1]

TRAIN = """
import os, time
import torch
import deeptide

def forget_to_train():
    while os.path.exists("sleep"):
        time.sleep(0.1)

torch.set_num_threads(1)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3}}
engine, *_ = deeptide.initialize(model=torch.nn.Linear(16, 16), config=config)
print("ready", os.getpid(), flush=True)
while True:
    if os.environ["RANK"] == "3":
        forget_to_train()
    engine.backward(engine(torch.ones(1, 16)).sum())
    engine.step()
    time.sleep(0.02)
"""


RAISE = """
import os, time
import torch
import deeptide

class Model(torch.nn.Linear):
    def forward(self, x):
        if os.environ["RANK"] == "3" and os.path.exists("raise"):
            raise ValueError("bad batch")
        return super().forward(x)

torch.set_num_threads(1)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3}, "deeptide": {"error_grace": 1}}
engine, *_ = deeptide.initialize(model=Model(16, 16), config=config)
print("ready", os.getpid(), flush=True)
try:
    while True:
        engine.backward(engine(torch.ones(1, 16)).sum())
        engine.step()
        time.sleep(0.02)
except Exception as error:
    print("ended by", error, flush=True)
while True:
    time.sleep(1)  # with the engine
"""


class Training:
    """Two hosts with two ranks each, which train until they are stopped."""

    ENV: ClassVar = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}

    def __init__(self, hosts, *options, start=None, program=TRAIN):
        self.hosts = hosts
        start = start or (lambda *words: hosts.start(*words, env=self.ENV))
        self.job = start(*options, *hosts.python("train.py", program))
        self.job.wait_for("ready", 4, timeout=90)
        self.pids = {int(line.split("]")[0][6:]): int(line.split()[3]) for _, line in self.job.out if "ready" in line}
        time.sleep(0.5)  # all are past their first steps

    def report(self, number=1, timeout=30):
        """The launcher's whole report of the hang of this number."""
        mark = "state of the ranks:"
        deadline = time.monotonic() + timeout
        while self.job.errors.count(mark) < number:
            assert time.monotonic() < deadline, self.job.errors
            time.sleep(0.05)
        time.sleep(0.5)
        assert self.job.errors.count(mark) == number, "reported more than once:\n" + self.job.errors
        return self.job.errors.split(mark)[number]

    def launcher(self):
        """Its pid, with `salloc` before it or not."""
        return next(pid for pid, text in self.hosts.head.processes().items() if text.startswith(f"{DEEPTIDE} -"))

    def end(self):
        launcher = self.launcher()
        os.kill(launcher, signal.SIGINT)
        os.kill(launcher, signal.SIGINT)
        self.job.wait()
        self.hosts.expect_nothing_left()


def report_of_the_sleeper(training):
    """Rank 3, on the second host, sleeps in Python; the others are told apart from it."""
    report = training.report()
    assert "\nrank 3 on worker-2 is " in report, report
    assert f"rank 3, process {training.pids[3]} on worker-2:" in report, report
    assert "in forget_to_train" in report, "its Python stack"
    assert "\nranks 0-2 on worker-1, worker-2 waiting for " in report, report
    return report


@pytest.mark.rotates
def test_one_report_over_all_hosts_names_the_late(hosts):
    training = Training(hosts, "--hang_timeout", "2")
    sleep = hosts.folder / "sleep"

    sleep.touch()
    report = report_of_the_sleeper(training)
    assert "native:" in report, "its native stacks"

    listed = hosts.run_bare("ps").output.splitlines()[1].split("\t")
    assert listed[:3] == [str(training.job.process.pid), "2", "4"] and int(listed[3]) > 0, listed
    stacks = hosts.run_bare("stacks").output
    assert stacks.startswith("rank 3 on worker-2 is ") and "in forget_to_train" in stacks, stacks

    sleep.unlink()  # the training goes on; then a whole host stops
    time.sleep(1)
    for rank in (2, 3):
        os.kill(training.pids[rank], signal.SIGSTOP)
    report = training.report(2)
    assert report.startswith("\n"), report
    for rank in (2, 3):
        assert f"rank {rank}, process {training.pids[rank]} on worker-2:" in report, report
    stopped = [line for line in report.splitlines() if " stopped (SIGSTOP or a debugger)" in line]
    assert stopped and all("on worker-2" in line for line in stopped), report
    assert "the process cannot answer" in report and "system call" in report, report
    assert "on worker-1 waiting for " in report, report
    assert report.index("stopped") < report.index("on worker-1 waiting for"), report
    training.end()


@pytest.mark.rotates
@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ps_and_stacks_show_the_job_on_all_hosts(hosts, launcher):
    if not shutil.which(launcher):
        pytest.skip(f"{launcher} is not installed")
    assert hosts.run_bare("ps").output == "no live jobs\n"
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    words = ["sh", "-c", "echo ready; exec sleep 1000"]
    job = hosts.start("--launcher", launcher, *words, ssh=launcher == "ssh", env=env)
    job.wait_for("ready", 4)
    header, line = hosts.run_bare("ps").output.splitlines()
    assert header.split("\t") == ["JOB", "HOSTS", "RANKS", "STEP", "WAITING", "AGE", "COMMAND"]
    assert line.split("\t")[:5] == [str(job.process.pid), "2", "4", "0", "0 s"], line
    assert line.endswith("sh -c echo ready; exec sleep 1000"), line
    stacks = hosts.run_bare("stacks", job.process.pid).output
    assert stacks.startswith("ranks 0-3 on worker-1, worker-2 are not in the engine, waiting for no collective\n"), (
        stacks
    )
    assert "the process cannot answer" in stacks, stacks
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert hosts.run_bare("ps").output == "no live jobs\n"
    hosts.expect_nothing_left()


def starter(request, hosts, launcher):
    """How Training starts a job through mpirun or srun."""
    if launcher != "slurm":
        return lambda *words: hosts.start_mpi(launcher, *words, more=Training.ENV)
    slurm = request.getfixturevalue("slurm")
    return lambda *words: hosts.start_slurm(slurm, *words, more=Training.ENV)


@pytest.mark.rotates
@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi", "slurm"])
def test_ranks_of_a_starter_are_in_one_report_too(request, hosts, launcher):
    training = Training(hosts, "--hang_timeout", "2", start=starter(request, hosts, launcher))
    sleep = hosts.folder / "sleep"

    sleep.touch()
    report = report_of_the_sleeper(training)
    assert "not connected" not in report and "no answer" not in report, report

    listed = hosts.run_bare("ps").output.splitlines()[1].split("\t")
    assert listed[:3] == [str(training.launcher()), "2", "4"] and int(listed[3]) > 0, listed
    stacks = hosts.run_bare("stacks").output
    assert stacks.startswith("rank 3 on worker-2 is ") and "in forget_to_train" in stacks, stacks

    sleep.unlink()
    time.sleep(1)
    sleep.touch()
    assert "\nrank 3 on worker-2 is " in training.report(2)
    training.end()


@pytest.mark.rotates
def test_ranks_whose_link_is_gone_report_by_themselves(hosts):
    training = Training(hosts, "--hang_timeout", "2", start=starter(None, hosts, "openmpi"))
    listening = hosts.head.run("ss", "-Hltnp").stdout.splitlines()
    (port,) = {line.split()[3].rsplit(":", 1)[1] for line in listening if '"deeptide"' in line}
    drop = ["INPUT", "-p", "tcp", "--dport", port, "-j", "DROP"]
    hosts.head.run("iptables", "-A", *drop)
    try:
        (hosts.folder / "sleep").touch()
        training.job.wait_for_error("state of the ranks:", timeout=40)
        report = training.job.errors
        assert "rank 0 waiting for " in report or "rank 1 waiting for " in report or "rank 2 waiting" in report, report
        training.end()
    finally:
        hosts.head.run("iptables", "-D", *drop)


def test_a_host_that_does_not_answer_is_named(hosts):
    training = Training(hosts, "--hang_timeout", "2", "--heartbeat_timeout", "60")
    hosts.workers[1].set_link("down")
    report = training.report()
    assert report.startswith("\nranks 2, 3 on worker-2: no answer from the host\n"), report
    assert "on worker-1 waiting for " in report, report
    hosts.workers[1].set_link("up")
    training.end()


def test_an_error_on_one_host_ends_the_waits_of_all(hosts):
    """Rank 3, on the second host, raises and keeps its engine: what every rank's error says comes from it."""
    training = Training(hosts, program=RAISE)
    (hosts.folder / "raise").touch()
    training.job.wait_for("ended by bad batch", 1)
    training.job.wait_for("rank 3 raised ValueError in forward: bad batch", 3, timeout=60)
    training.end()
