# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs through srun, on a SLURM of our own over the hosts."""

import os
import signal
import time

import pytest
from conftest import DEEPTIDE, MPIRUNS
from test_faults import DETECTED, STAY, parent, rank_pids, ready
from test_jobs import PLACES, SHOW

BY_NAME = [line.replace("at=10.83.0.2", "at=worker-1") for line in PLACES]
ANSWERS = (
    "trap 'echo saving; sleep 0.$RANK; echo saved; exit 0' INT; trap 'echo terminated; exit 9' TERM; "
    "echo ready; while :; do sleep 0.05; done"
)


def launcher(hosts):
    """Its pid; `salloc` stands before it."""
    return next(pid for pid, text in hosts.head.processes().items() if text.startswith(f"{DEEPTIDE} --launcher"))


def test_an_allocation_tells_each_rank_its_place(hosts, slurm):
    job = hosts.start_slurm(slurm, "sh", "-c", SHOW)
    assert job.wait() == 0, job.errors
    assert sorted(job.output.splitlines()) == BY_NAME, job.errors
    hosts.expect_nothing_left()


def test_a_hostfile_names_the_nodes_where_there_is_no_allocation(hosts, slurm):
    words = ["--launcher", "slurm", "--include", "worker-2@worker-3", "sh", "-c", SHOW + " on=$SLURMD_NODENAME"]
    job = hosts.run(*words, slots=(2, 2, 2), ssh=False, env=slurm.variables)
    assert job.code == 0, job.errors
    expected = [
        f"{line.replace('worker-1', 'worker-2')} on=worker-{2 + rank // 2}" for rank, line in enumerate(BY_NAME)
    ]
    assert sorted(job.output.splitlines()) == expected, job.errors
    hosts.expect_nothing_left()


def test_nodes_with_different_numbers_of_tasks(hosts, slurm):
    text = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $CROSS_RANK/$CROSS_SIZE"
    job = hosts.start_slurm(slurm, "--launcher_args", "-n 3 --distribution=block", "sh", "-c", text)
    assert job.wait() == 0, job.errors
    places = sorted(job.output.splitlines())
    assert places == ["[rank 0] 0/3 0/2 0/2", "[rank 1] 1/3 1/2 0/2", "[rank 2] 2/3 0/1 1/2"], job.errors


def test_cores_of_the_allocation_are_the_ranks(hosts, slurm):
    env = {"SLURM_CPUS_PER_TASK": "2"}  # as `salloc --cpus-per-task` sets it; srun alone does not take it over
    job = hosts.start_slurm(slurm, "sh", "-c", "echo cores=$SLURM_CPUS_PER_TASK", more=env)
    assert job.wait() == 0, job.errors
    assert job.output.count("cores=2") == 4, job.output


def test_a_failing_rank_passes_on_its_code(hosts, slurm):
    since = time.monotonic()
    job = hosts.start_slurm(slurm, "sh", "-c", "if [ $RANK = 2 ]; then sleep 0.5; exit 5; fi; sleep 1000")
    assert job.wait() == 5, job.errors
    assert time.monotonic() - since < DETECTED
    assert "rank 2 exited with code 5" in job.errors
    assert "SIGTERM" not in job.errors, job.errors  # the others obeyed, and are no failures
    hosts.expect_nothing_left()


@pytest.mark.parametrize("fault", ["rank", "supervisor", "keeper", "launcher", "srun"])
def test_whatever_is_killed_ends_the_job(hosts, slurm, fault):
    job = hosts.start_slurm(slurm, "sh", "-c", STAY)
    since = ready(job)
    rank = rank_pids(job)[3]
    on_head = hosts.head.processes()
    pid = {
        "rank": lambda: rank,
        "supervisor": lambda: parent(rank),
        "keeper": lambda: parent(parent(rank)),
        "launcher": lambda: launcher(hosts),
        "srun": lambda: min(p for p, text in on_head.items() if "srun --" in text.split(" sh ")[0]),
    }[fault]()
    os.kill(pid, signal.SIGKILL)
    code = job.wait()
    assert code == 137 or fault == "launcher", job.errors  # for a killed command salloc says 0
    assert time.monotonic() - since < DETECTED
    if fault == "rank":
        assert "rank 3 was killed by signal 9" in job.errors
    hosts.expect_nothing_left()


def test_interrupt_once_is_clean(hosts, slurm):
    job = hosts.start_slurm(slurm, "sh", "-c", ANSWERS)
    job.wait_for("ready", 4)
    os.kill(launcher(hosts), signal.SIGINT)
    assert job.wait(DETECTED) == 130, job.errors
    assert job.output.count("saved") == 4 and "terminated" not in job.output, job.output + job.errors
    hosts.expect_nothing_left()


def test_interrupt_twice_is_now(hosts, slurm):
    job = hosts.start_slurm(slurm, "sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 0.05; done")
    job.wait_for("ready", 4)
    os.kill(launcher(hosts), signal.SIGINT)
    job.wait_for_error("^C again")
    time.sleep(1.1)  # two within a second are one: a terminal and a tool that both tell of one ^C
    os.kill(launcher(hosts), signal.SIGINT)
    assert job.wait(DETECTED) == 130, job.errors
    hosts.expect_nothing_left()


def test_a_cancelled_step_is_no_success(hosts, slurm):
    job = hosts.start_slurm(slurm, "sh", "-c", STAY)
    ready(job)
    slurm.run("scancel", slurm.run("squeue", "-h", "-s", "-o", "%i").strip())
    assert job.wait(DETECTED) not in (0, None), job.errors
    hosts.expect_nothing_left()


def test_signals_of_the_users_own_reach_the_ranks_alone(hosts, slurm):
    text = "trap 'echo warned; exit 0' USR1; sh -c 'sleep 1000' & echo ready; while :; do sleep 0.05; done"
    job = hosts.start_slurm(slurm, "sh", "-c", text)
    job.wait_for("ready", 4)
    slurm.run("scancel", "--signal=USR1", slurm.run("squeue", "-h", "-s", "-o", "%i").strip())
    assert job.wait(DETECTED) == 0, job.errors
    assert job.output.count("warned") == 4, job.output
    hosts.expect_nothing_left()


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_mpirun_within_an_allocation(hosts, slurm, launcher):
    """It starts its daemons by srun, whose variables its ranks inherit: they are not the ranks' own."""
    job = hosts.run_mpi(launcher, "sh", "-c", SHOW, slurm=slurm)
    assert job.code == 0, job.errors
    assert sorted(job.output.splitlines()) == PLACES, job.errors
    hosts.expect_nothing_left()
