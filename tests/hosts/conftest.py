# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs over real hosts: the launcher started in one namespace, its ranks in others, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from network import Network, missing_reason
from slurm import Slurm, missing_packages

# The rooms of this folder: their tests use each other's models.
sys.path[1:1] = [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]

DEEPTIDE = shutil.which("deeptide")
NUM_WORKERS = 8
TURNS = 3
# Debian's have names of their own; Intel's is where tools/setup.sh puts it.
MPIRUNS = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich", "impi": f"{sys.prefix}/impi/bin/mpirun"}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out unless THOROUGH=1, or where a test is named by itself")
    config.addinivalue_line("markers", "rotates: a third of its cases where TURN says which, unless its file CHANGED")


def _of_other_turns(items):
    """Cases of tests that rotate which are another turn's: two thirds of them, in turns over all."""
    if "TURN" not in os.environ:
        return []
    turn, changed = int(os.environ["TURN"]), os.environ.get("CHANGED", "").split()
    rotating = [
        item
        for item in items
        if item.get_closest_marker("rotates") and item.path.relative_to(item.config.rootpath).as_posix() not in changed
    ]
    return [item for number, item in enumerate(rotating) if number % TURNS != turn % TURNS]


def pytest_collection_modifyitems(config, items):
    if os.environ.get("THOROUGH") == "1" or any("::" in argument for argument in config.args):
        return
    chosen = [item for item in items if not item.get_closest_marker("slow")]
    others = _of_other_turns(chosen)
    chosen = [item for item in chosen if item not in others]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def network():
    reason = missing_reason() or (None if DEEPTIDE else "no `deeptide` in PATH")
    if reason:
        pytest.skip(reason)
    made = Network(NUM_WORKERS)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def slurm(network):
    if missing := missing_packages():
        pytest.skip("not installed: " + " ".join(missing))
    made = Slurm(network)
    yield made
    made.remove()


class Job:
    """A started launcher, `within` what gives it hosts; its output is read meanwhile."""

    def __init__(self, network, words, env, cwd, within=()):
        self.network = network
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            network.head.command(*within, DEEPTIDE, *words),
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out, self.err = [], []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.append((time.monotonic(), line))

    @property
    def output(self):
        return "".join(line for _, line in self.out)

    @property
    def errors(self):
        return "".join(line for _, line in self.err)

    def wait_for(self, text, count=1, timeout=30):
        """Until `count` lines of output hold `text`."""
        deadline = time.monotonic() + timeout
        while sum(text in line for _, line in list(self.out)) < count:
            assert time.monotonic() < deadline, f"no {count} x '{text}'\n{self.output}\n{self.errors}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.output}\n{self.errors}"
            time.sleep(0.01)

    def wait_for_error(self, text, timeout=30):
        deadline = time.monotonic() + timeout
        while text not in self.errors:
            assert time.monotonic() < deadline, f"no '{text}'\n{self.errors}"
            time.sleep(0.01)

    def signal(self, number):
        # `ip netns exec` becomes the launcher: it has its process id.
        self.process.send_signal(number)

    def wait(self, timeout=30):
        """The exit code, 128 + signal if it was killed."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {timeout} s\n{self.output}\n{self.errors}")
        for reader in self._readers:
            reader.join(5)
        return code if code >= 0 else 128 - code


class Hosts:
    """The tools of a test: jobs on the network, and the proof that they leave nothing."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        self.head, self.workers = network.head, network.workers
        self.jobs = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("DEEPTIDE_", "CUDA_"))}
        self.environment["HOME"] = str(folder)  # no .deeptide_env of the developer's
        self.before = self._shared_files()

    def start(self, *words, slots=(2, 2), ssh=True, env=None, slurm=None, command=()):
        """A job of `words`, or of the launcher's `command`, such as ("bench", "comm").

        With `slurm`, it starts within an allocation of that SLURM.
        """
        options = ["-H", self.network.hostfile(*slots)]
        if ssh:
            options += ["--launcher_args", self.network.ssh_arguments]
        within = slurm.allocation(slots) if slurm else ()
        env = {**self.environment, **(slurm.variables if slurm else {}), **(env or {})}
        job = Job(self.network, [*command, *options, *map(str, words)], env, self.folder, within)
        self.jobs.append(job)
        return job

    def run(self, *words, timeout=60, **settings):
        job = self.start(*words, **settings)
        job.code = job.wait(timeout)
        return job

    def run_bare(self, *words, timeout=60):
        """Any command of `deeptide` on the head."""
        job = Job(self.network, list(map(str, words)), self.environment, self.folder)
        self.jobs.append(job)
        job.code = job.wait(timeout)
        return job

    def run_mpi(self, launcher, *words, timeout=90, **settings):
        job = self.start_mpi(launcher, *words, **settings)
        job.code = job.wait(timeout)
        return job

    def start_mpi(self, launcher, *words, more=None, **settings):
        """Through mpirun: each kind is told in its own way how to reach our hosts."""
        mpirun = shutil.which(MPIRUNS[launcher])
        if not mpirun:
            pytest.skip(f"no {MPIRUNS[launcher]}: {launcher} is not installed")
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        # A script, not a link: mpirun looks for its daemons beside the name that it was called by, Intel's in PATH.
        # Shells change the order of variables, and MPICH loses the last one.
        (folder / "mpirun").write_text(
            f"#!{sys.executable} -IS\nimport os, sys\n"
            f"os.environ['PATH'] = '{os.path.dirname(mpirun)}:' + os.environ['PATH']\n"
            f"os.unsetenv('LC_CTYPE')\nos.execv('{mpirun}', ['{mpirun}', *sys.argv[1:]])\n"
        )
        (folder / "mpirun").chmod(0o755)
        env = {
            "PATH": f"{folder}:{self.environment['PATH']}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **(more or {}),
        }
        if "slurm" not in settings:  # there they all use srun
            for name in ("OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"):
                env[name] = self.network.ssh_arguments
        if launcher != "openmpi":  # all namespaces have one host name, which each resolves to itself
            words = ["--launcher_args", "-iface eth0", *words]
        words = ["--launcher", launcher, "--master_addr", self.workers[0].address, *words]
        return self.start(*words, ssh=False, env=env, **settings)

    def start_slurm(self, slurm, *words, slots=(2, 2), more=None):
        """From within an allocation, without a hostfile."""
        env = {**self.environment, **slurm.variables, **(more or {})}
        words = ["--launcher", "slurm", *map(str, words)]
        job = Job(self.network, words, env, self.folder, slurm.allocation(slots))
        self.jobs.append(job)
        return job

    @staticmethod
    def start_listener(host, port):
        # The port may have connections of an earlier job that are still closing.
        code = f"import socket, time; s = socket.create_server(('', {port})); print(1, flush=True); time.sleep(99)"
        process = subprocess.Popen(host.command(sys.executable, "-c", code), stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    def python(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return ["--python", sys.executable, path]

    @staticmethod
    def _shared_files():
        return {path.name for path in Path("/dev/shm").iterdir()}

    def left(self):
        """All that is there besides sshd: processes, ports, shared memory, temporary files of the launcher."""
        found = [f"{h.name}: {text}" for h in self.network.hosts for text in h.processes().values()]
        found += [f"{h.name}: port {port}" for h in self.network.hosts for port in h.ports()]
        found += [f"/dev/shm/{name}" for name in self._shared_files() - self.before if name.startswith("deeptide")]
        return found

    def expect_nothing_left(self, within=10):
        deadline = time.monotonic() + within
        while left := self.left():
            assert time.monotonic() < deadline, "left behind:\n" + "\n".join(left)
            time.sleep(0.05)


@pytest.fixture
def hosts(network):
    folder = Path(tempfile.mkdtemp(prefix="deeptide-job-"))
    made = Hosts(network, folder)
    yield made
    for job in made.jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
    for host in network.workers:  # whatever a test did to it
        host.set_link("up")
        host.run("iptables", "-F", check=False)
        host.run("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        if not host.sshd:
            host.start_sshd()
    shutil.rmtree(folder, ignore_errors=True)
