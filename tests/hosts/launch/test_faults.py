# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that break: whatever dies, the whole job ends within seconds with the right code, and leaves nothing behind."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import MPIRUNS

# A rank with a child of its own that leaves the group; both stay until they are ended.
STAY = "setsid sleep 1000 & sleep 1000 & echo ready $$; while :; do sleep 0.1; done"
DETECTED = 10.0  # seconds from the fault to the end


def ready(job, ranks=4):
    job.wait_for("ready", ranks)
    return time.monotonic()


def rank_pids(job):
    return {int(line.split("]")[0][6:]): int(line.split()[3]) for _, line in job.out if "ready" in line}


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pid_of_agent(job, rank=3):
    return parent(rank_pids(job)[rank])


def expect_end(hosts, job, code, since, words):
    assert job.wait(30) == code, job.errors
    took = time.monotonic() - since
    assert took < DETECTED, f"{took:.1f} s\n{job.errors}"
    assert words in job.errors, job.errors
    hosts.expect_nothing_left()


def test_a_killed_rank(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    os.kill(rank_pids(job)[3], signal.SIGKILL)
    expect_end(hosts, job, 137, since, "rank 3 on worker-2 was killed by signal 9 (SIGKILL")
    assert "; the others were stopped" in job.errors


def test_a_rank_that_fails_passes_on_its_code_and_its_last_lines(hosts):
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise SystemExit(7) if len(sys.argv) > 1 else ValueError('bad batch')\n"
        "time.sleep(100)"
    )
    job = hosts.run(*hosts.python("fail.py", code))
    assert job.code == 1
    assert "[deeptide] last lines of rank 2:\n  Traceback" in job.errors
    assert job.errors.endswith("[deeptide] rank 2 on worker-2 exited with code 1; the others were stopped\n")
    assert hosts.run(*hosts.python("fail.py", code), "x").code == 7
    hosts.expect_nothing_left()


def test_the_same_error_of_all_ranks_is_told_once(hosts):
    together = "import os, time\ntime.sleep(3 - time.time() % 2)\n"
    code = together + "raise RuntimeError(f'cannot open data {os.environ[\"RANK\"]}.bin')"
    job = hosts.run(*hosts.python("fail.py", code))
    assert job.code == 1
    told = [line for line in job.errors.splitlines() if line.startswith("[deeptide] rank") and "report" in line]
    assert len(told) == 1 and "RuntimeError: cannot open data" in told[0], job.errors


def test_a_rank_that_ends_early_is_named_when_others_fail(hosts):
    text = "if [ $RANK = 1 ]; then exit 0; fi; sleep 1; if [ $RANK = 0 ]; then exit 3; fi; sleep 100"
    job = hosts.run("sh", "-c", text)
    assert job.code == 3
    assert "(rank 1 had already ended with code 0)" in job.errors
    hosts.expect_nothing_left()


def test_a_rank_that_ignores_the_request_is_killed(hosts):
    text = "trap '' TERM; echo ready; if [ $RANK = 0 ]; then sleep 0.3; exit 4; fi; while :; do sleep 0.1; done"
    job = hosts.start("--grace", "1", "sh", "-c", text)
    since = ready(job)
    expect_end(hosts, job, 4, since, "rank 0 on worker-1 exited with code 4")


def test_a_killed_agent(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    os.kill(pid_of_agent(job), signal.SIGKILL)
    expect_end(hosts, job, 255, since, "host worker-2 closed its connection")


def test_a_killed_keeper(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    os.kill(parent(pid_of_agent(job)), signal.SIGKILL)
    assert job.wait(30) != 0
    assert time.monotonic() - since < DETECTED
    hosts.expect_nothing_left()


def test_a_killed_launcher(hosts):
    job = hosts.start("sh", "-c", STAY)
    ready(job)
    job.signal(signal.SIGKILL)
    assert job.wait() == 137
    hosts.expect_nothing_left(DETECTED)


def test_a_killed_ssh(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    os.kill(next(pid for pid, text in hosts.head.processes().items() if "-- worker-1" in text), signal.SIGKILL)
    expect_end(hosts, job, 255, since, "host worker-1 closed its connection")


def test_a_stopped_rank_holds_nobody_up(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    pids = rank_pids(job)
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    expect_end(hosts, job, 137, since, "rank 0 on worker-1 was killed")


def test_a_stopped_agent_counts_as_lost(hosts):
    job = hosts.start("--heartbeat_timeout", "2", "sh", "-c", STAY)
    since = ready(job)
    agent = pid_of_agent(job)
    os.kill(agent, signal.SIGSTOP)
    assert job.wait(30) == 255, job.errors
    assert time.monotonic() - since < DETECTED
    assert "host worker-2 was silent for 2 s" in job.errors
    os.kill(agent, signal.SIGCONT)  # a host that wakes up finds its connection gone
    hosts.expect_nothing_left()


def test_a_link_that_goes_down(hosts):
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    hosts.workers[1].set_link("down")
    expect_end(hosts, job, 255, since, "host worker-2 was silent for 5 s")


def test_packets_that_are_dropped(hosts):
    if hosts.workers[0].run("iptables", "-L", "-n", check=False).returncode != 0:
        pytest.skip("no iptables in this kernel")
    job = hosts.start("sh", "-c", STAY)
    since = ready(job)
    for chain in ("INPUT", "OUTPUT"):
        hosts.workers[0].run("iptables", "-A", chain, "-j", "DROP")
    expect_end(hosts, job, 255, since, "host worker-1 was silent for 5 s")


def test_a_slow_link_is_no_fault(hosts):
    shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "512kbit", "burst", "16kb", "latency", "400ms"]
    if hosts.workers[0].run(*shape, check=False).returncode != 0:
        pytest.skip("no tbf in this kernel")
    text = "i=0; while [ $i -lt 3000 ]; do echo line $i of rank $RANK, long enough to fill the link; i=$((i+1)); done"
    job = hosts.run("sh", "-c", text, slots=(1, 1))
    assert job.code == 0, job.errors
    assert job.output.count("\n") == 6000
    hosts.expect_nothing_left()


def test_a_host_that_refuses_ssh(hosts):
    hosts.workers[1].stop_sshd()
    since = time.monotonic()
    job = hosts.start("sh", "-c", STAY)
    expect_end(hosts, job, 255, since, "host worker-2 cannot be reached: ssh: connect to host 10.83.0.3 port 22")


def test_a_host_without_the_folder_or_the_script(hosts):
    since = time.monotonic()
    job = hosts.start("--no_python", "/no/such/program")
    expect_end(hosts, job, 2, since, "program '/no/such/program' does not exist")
    assert "host worker-" in job.errors


def test_a_noisy_login_shell_is_no_fault(hosts):
    (hosts.folder / "noisy").write_text("echo Welcome to this cluster; echo and mind the step >&2\n")
    job = hosts.run("--venv_script", hosts.folder / "noisy", "sh", "-c", "echo fine")
    assert job.code == 0 and job.output.count("fine") == 4, job.errors
    assert "worker-1: and mind the step" in job.errors


def test_slots_that_are_not_there_are_refused_at_once(hosts):
    job = hosts.run("--include", "worker-2:0,7", "true")
    assert job.code == 2 and "host 'worker-2' has no slot 7; it has 0,1" in job.errors
    job = hosts.run("--num_gpus", "3", "true")
    assert job.code == 2 and "--num_gpus 3: host 'worker-1' has 2 slots" in job.errors


@pytest.fixture
def small_memory():
    """A control group with 64 MiB; yields the file that takes a process in."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (one if one.is_dir() else two) / f"deeptide-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if one.is_dir() else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group for memory: {error}")
    yield folder / "cgroup.procs"
    time.sleep(0.2)
    folder.rmdir()


def test_out_of_memory(hosts, small_memory):
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('ready', os.getpid(), flush=True)\n"
        "    while not os.path.exists('go'):\n"
        "        time.sleep(0.05)\n"
        "    hoard = [bytearray(os.urandom(1 << 20)) for _ in range(200)]\n"
        "time.sleep(100)"
    )
    since = time.monotonic()
    job = hosts.start(*hosts.python("hoard.py", code), slots=(1, 1))
    job.wait_for("ready")
    small_memory.write_text(str(rank_pids(job)[1]))  # from here: a namespace has a /sys of its own
    (hosts.folder / "go").touch()
    expect_end(hosts, job, 137, since, "rank 1 on worker-2 was killed by the kernel's out-of-memory killer at ")
    assert re.search(r"killer at [\d.]+ MiB;", job.errors), job.errors


@pytest.mark.skipif(not shutil.which("pdsh"), reason="pdsh is not installed")
@pytest.mark.parametrize("fault", ["rank", "agent", "launcher", "link"])
def test_the_same_over_pdsh(hosts, fault):
    env = {"PDSH_SSH_ARGS_APPEND": hosts.network.ssh_arguments}
    job = hosts.start("--launcher", "pdsh", "sh", "-c", STAY, ssh=False, env=env)
    since = ready(job)
    worker = hosts.workers[1]
    if fault == "rank":
        os.kill(rank_pids(job)[3], signal.SIGKILL)
        expect_end(hosts, job, 137, since, "rank 3 on worker-2 was killed")
    elif fault == "agent":
        os.kill(pid_of_agent(job), signal.SIGKILL)
        expect_end(hosts, job, 255, since, "host worker-2 closed its connection")
    elif fault == "link":
        worker.set_link("down")
        expect_end(hosts, job, 255, since, "host worker-2 was silent")
    else:
        job.signal(signal.SIGKILL)
        assert job.wait() == 137
        hosts.expect_nothing_left(DETECTED)


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_a_failing_rank_under_mpirun(hosts, launcher):
    since = time.monotonic()
    job = hosts.run_mpi(launcher, "sh", "-c", "if [ $RANK = 3 ]; then sleep 0.5; exit 5; fi; sleep 100")
    assert job.code == 5, job.errors
    assert "rank 3 exited with code 5" in job.errors
    assert time.monotonic() - since < 20
    hosts.expect_nothing_left()


@pytest.mark.parametrize("launcher", MPIRUNS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, 137)])
def test_the_launcher_is_stopped_or_killed_over_mpirun(hosts, launcher, number, code):
    job = hosts.start_mpi(launcher, "sh", "-c", STAY)
    since = ready(job)
    job.signal(number)
    assert job.wait() == code, job.errors
    assert time.monotonic() - since < DETECTED, job.errors
    hosts.expect_nothing_left(DETECTED)
