# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that go well: what each rank finds, over every transport; options that need several hosts."""

import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import MPIRUNS
from network import OTHER_SSH_PORT

SHOW = "echo rank=$RANK/$WORLD_SIZE local=$LOCAL_RANK/$LOCAL_WORLD_SIZE node=$CROSS_RANK/$CROSS_SIZE at=$MASTER_ADDR"
PLACES = [
    "[rank 0] rank=0/4 local=0/2 node=0/2 at=10.83.0.2",
    "[rank 1] rank=1/4 local=1/2 node=0/2 at=10.83.0.2",
    "[rank 2] rank=2/4 local=0/2 node=1/2 at=10.83.0.2",
    "[rank 3] rank=3/4 local=1/2 node=1/2 at=10.83.0.2",
]


def test_ssh_tells_each_rank_its_place(hosts):
    job = hosts.run("sh", "-c", SHOW)
    assert job.code == 0, job.errors
    assert sorted(job.output.splitlines()) == PLACES
    hosts.expect_nothing_left()


@pytest.mark.skipif(not shutil.which("pdsh"), reason="pdsh is not installed")
def test_pdsh_tells_each_rank_its_place(hosts):
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    job = hosts.run("--launcher", "pdsh", "sh", "-c", SHOW, ssh=False, env=env)
    assert job.code == 0, job.errors
    assert sorted(job.output.splitlines()) == PLACES
    hosts.expect_nothing_left()


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_mpirun_tells_each_rank_its_place(hosts, launcher):
    own = 'test "$I_MPI_INFO_BRAND" && ' if launcher == "impi" else ""  # Intel's ranks, not those of another in PATH
    job = hosts.run_mpi(launcher, "sh", "-c", own + SHOW)
    assert job.code == 0, job.errors
    assert sorted(job.output.splitlines()) == PLACES, job.errors
    hosts.expect_nothing_left()


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_mpirun_binds_no_rank(hosts, launcher):
    mask = "grep Cpus_allowed: /proc/self/status"
    job = hosts.run_mpi(launcher, "sh", "-c", mask)
    assert job.code == 0, job.errors
    unbound = subprocess.run(mask.split(), capture_output=True, text=True, check=True).stdout.split()[1]
    assert [line.split()[-1] for line in job.output.splitlines()] == [unbound] * 4, job.output


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", *MPIRUNS])
def test_ssh_uses_the_port(hosts, launcher):
    words = ["--ssh_port", OTHER_SSH_PORT, "sh", "-c", "echo came by $SSH_CONNECTION"]
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    if launcher in MPIRUNS:
        job = hosts.run_mpi(launcher, *words, slots=(1, 1))
    elif shutil.which(launcher):
        job = hosts.run("--launcher", launcher, *words, ssh=launcher == "ssh", env=env, slots=(1, 1))
    else:
        pytest.skip(f"{launcher} is not installed")
    assert job.code == 0, job.errors
    assert [line.split()[-1] for line in job.output.splitlines()] == [str(OTHER_SSH_PORT)] * 2, job.output


def test_slots_become_visible_devices_and_ranks(hosts):
    job = hosts.run(
        "--include", "worker-3:0,2@worker-1:1", "sh", "-c", "echo $RANK $CUDA_VISIBLE_DEVICES", slots=(2, 2, 4)
    )
    assert sorted(job.output.splitlines()) == ["[rank 0] 0 1", "[rank 1] 1 0,2", "[rank 2] 2 0,2"], job.errors


def test_arguments_and_exports_arrive_unchanged(hosts):
    nasty = ["a b", "it's", '"q"', "", "$HOME", "*", "--x", "back\\slash", "two\nlines", "ä"]
    (hosts.folder / ".deeptide_env").write_text("FROM_FILE=semi;colon $(id) 'x'\n")
    script = hosts.python(
        "show.py",
        "import os, sys\nprint(sys.argv[1:], [os.environ.get(n) for n in ('NCCL_X', 'FROM_FILE', 'SECRET_OF_MINE')])\n",
    )
    env = {"NCCL_X": "v w'\"", "SECRET_OF_MINE": "hunter2"}
    job = hosts.run(*script, *nasty, slots=(1, 1), env=env)
    expected = f"{nasty} {['v w' + chr(39) + chr(34), 'semi;colon $(id) ' + chr(39) + 'x' + chr(39), None]}"
    assert sorted(job.output.splitlines()) == [f"[rank 0] {expected}", f"[rank 1] {expected}"], job.errors


def test_ranks_run_in_the_launchers_folder(hosts):
    job = hosts.run("pwd", slots=(1, 1))
    assert job.output.count(str(hosts.folder)) == 2, job.output + job.errors


def test_a_venv_script_is_read_first(hosts):
    (hosts.folder / "activate").write_text("export FROM_VENV=yes\nfunction deactivate () { true; }\n")
    job = hosts.run("--venv_script", hosts.folder / "activate", "sh", "-c", "echo venv=$FROM_VENV", slots=(1, 1))
    assert job.output.count("venv=yes") == 2, job.output + job.errors


def test_no_ssh_starts_each_part_by_itself(hosts):
    words = [
        "--no_ssh",
        "--master_addr",
        "10.83.0.2",
        "--node_rank",
        "1",
        "sh",
        "-c",
        "echo $RANK/$WORLD_SIZE $MASTER_PORT",
    ]
    job = hosts.run(*words, ssh=False)
    assert sorted(job.output.splitlines()) == ["[rank 2] 2/4 29500", "[rank 3] 3/4 29500"], job.errors


def test_a_single_other_host_is_reached_too(hosts):
    job = hosts.run("sh", "-c", "hostname -I", slots=(1,))
    assert job.output.split() == ["[rank", "0]", "10.83.0.2"], job.output + job.errors


def test_a_busy_port_is_the_next_one_or_an_error(hosts):
    busy = hosts.start_listener(hosts.workers[0], 29500)
    job = hosts.run("sh", "-c", "echo port=$MASTER_PORT", slots=(1, 1))
    assert job.output.count("port=29501") == 2, job.output + job.errors
    job = hosts.run("--master_port", "29500", "true", slots=(1, 1))
    assert job.code == 2
    assert re.search(
        rf"worker-1: --master_port 29500 cannot be used: .*held by process {busy.pid}, 'python", job.errors
    )
    busy.kill()
    busy.wait()
    hosts.expect_nothing_left()


def test_each_rank_has_a_log(hosts):
    job = hosts.run("-q", "--enable_each_rank_log", "logs", "sh", "-c", "echo out $RANK; echo err >&2", slots=(1, 1))
    assert job.output == job.errors == ""
    texts = sorted(path.read_text() for path in (hosts.folder / "logs").iterdir())
    assert [sorted(text.split("\n")) for text in texts] == [["", "err", "out 0"], ["", "err", "out 1"]]


def test_interrupt_once_is_clean(hosts):
    job = hosts.start("sh", "-c", "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done")
    job.wait_for("ready", 4)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.output.count("saved") == 4, job.output + job.errors
    hosts.expect_nothing_left()


def test_interrupt_twice_is_now(hosts):
    job = hosts.start("sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 0.05; done")
    job.wait_for("ready", 4)
    job.signal(signal.SIGINT)
    job.wait_for_error("^C again")
    time.sleep(1.1)  # two within a second are one: a terminal and a tool that both tell of one ^C
    job.signal(signal.SIGINT)
    assert job.wait(5) == 130
    hosts.expect_nothing_left(3)


def test_ssh_runs_a_command_on_all_hosts(hosts):
    hosts.network.hostfile(1, 1, 1)
    words = ["ssh", "-H", hosts.network.folder / "hostfile", "--launcher_args", hosts.network.ssh_arguments]
    job = hosts.run_bare(*words, "--exclude", "worker-2", "hostname -I; exit 3")
    assert job.code == 3
    assert sorted(job.output.split("\n")) == ["", "[worker-1] 10.83.0.2 ", "[worker-3] 10.83.0.4 "]
    job = hosts.run_bare(*words, "echo", "a  b", "$HOME")
    assert job.output.count("a  b $HOME") == 3, job.output + job.errors


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_running_job_listens_on_no_port_and_shows_no_token(hosts, launcher):
    if not shutil.which(launcher):
        pytest.skip(f"{launcher} is not installed")
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    text = "echo ready token=$DEEPTIDE_JOB_TOKEN; sleep 100"
    job = hosts.start("--launcher", launcher, "sh", "-c", text, ssh=launcher == "ssh", env=env)
    job.wait_for("ready", 4)
    tokens = set(re.findall("token=([0-9a-f]{32})", job.output))
    assert len(tokens) == 1
    (token,) = tokens
    for host in hosts.network.hosts:
        assert host.ports() == [], host.name
        assert not any(token in words for words in host.processes().values())
    job.signal(signal.SIGINT)
    assert job.wait() == 130
