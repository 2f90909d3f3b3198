# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A SLURM over the tests' hosts: its controller on the head, a slurmd on some workers, keys and folders its own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
NUM_NODES = 3
START_LIMIT_S = 30

CONFIGURATION = """
ClusterName=deeptide
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort=6817
SlurmdPort=6818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


def missing_packages():
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return sorted({package for tool, package in PACKAGES.items() if not shutil.which(tool, path=path)})


class Slurm:
    """Daemons in the foreground, as our children: what we started we can end."""

    def __init__(self, network):
        self.network = network
        self.folder = Path(tempfile.mkdtemp(prefix="deeptide-slurm-"))
        self.folder.chmod(0o755)  # munge insists on it
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.environment = {**os.environ, **self.variables}
        self.environment["PATH"] += ":/usr/sbin:/sbin"
        self.nodes = network.workers[:NUM_NODES]
        self.daemons = []
        try:
            self._write_files()
            self._start_munge()
            self._start(network.head, "slurmctld", "-D")
            for node in self.nodes:
                self._start(node, "slurmd", "-D", "-N", node.name)
            self._wait(lambda: self.states() == ["idle"] * NUM_NODES, "nodes that are idle")
        except BaseException:
            self.remove()
            raise

    def _write_files(self):
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        controller = socket.gethostname().split(".")[0]  # a namespace has the machine's name
        text = CONFIGURATION.format(controller=controller, address=self.network.head.address, folder=self.folder)
        for node in self.nodes:
            text += f"NodeName={node.name} NodeHostname={controller} NodeAddr={node.address} CPUs=4 State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(text)
        # Named, so that slurmd looks for no control groups: a namespace has a /sys of its own without them.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self):
        files = {"key-file": "munge.key", "seed-file": "munge.seed", "socket": "munge.socket"}
        files |= {"pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._start(self.network.head, "munged", "--foreground", "--force", *options)
        self._wait((self.folder / "munge.socket").exists, "munge's socket")

    def _start(self, host, program, *words):
        path = shutil.which(program, path=self.environment["PATH"])
        with open(self.folder / f"{program}-{host.name}.out", "w") as out:
            daemon = subprocess.Popen(
                host.command(path, *words), env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.daemons.append(daemon)

    def _wait(self, done, what):
        deadline = time.monotonic() + START_LIMIT_S
        while not done():
            ended = [daemon.args[4:] for daemon in self.daemons if daemon.poll() is not None]
            late = time.monotonic() > deadline
            assert not ended and not late, f"SLURM has no {what}; ended: {ended}\n{self._logs()}"
            time.sleep(0.05)

    def _logs(self):
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"-- {path.name}:\n{path.read_text()[-1500:]}" for path in paths)

    def run(self, *words):
        """The output of a SLURM command on the head."""
        return subprocess.run(
            self.network.head.command(*words), env=self.environment, capture_output=True, text=True, timeout=30
        ).stdout

    @staticmethod
    def allocation(slots):
        """The words before a command that runs within it."""
        return ["salloc", "-Q", "--nodes", str(len(slots)), "--ntasks-per-node", str(slots[0])]

    def states(self):
        return self.run("sinfo", "-h", "-N", "-o", "%t").split()

    def remove(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
