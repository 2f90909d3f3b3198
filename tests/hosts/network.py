# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests: network namespaces on one switch, each with its address and its sshd. Made and removed here."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

OTHER_SSH_PORT = 2222
SERVICES = {"sshd", "munged", "slurmctld", "slurmd"}  # what belongs to a host and not to a job
NEEDED = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}


def missing_reason():
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = sorted({package for tool, package in NEEDED.items() if not shutil.which(tool, path=path)})
    if missing:
        return "not installed: " + " ".join(missing)
    probe = f"deeptide-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "this kernel or container does not let us make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def run(*words, check=True):
    return subprocess.run(list(map(str, words)), check=check, capture_output=True, text=True)


class Host:
    """One namespace: `name` as the hostfile has it, `address` on the switch."""

    def __init__(self, network, name, number):
        self.network, self.name = network, name
        self.namespace = f"{network.prefix}-{name}"
        self.address = network.addresses[name]
        self.link = f"{network.prefix}p{number}"
        self.sshd = None
        run("ip", "netns", "add", self.namespace)
        self._write_names()
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        run(
            *("ip", "link", "add", self.link, "netns", network.switch, "type", "veth"),
            *("peer", "name", "eth0", "netns", self.namespace),
        )
        run("ip", "-n", network.switch, "link", "set", self.link, "master", "switch", "up")
        run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def _write_names(self):
        """Its /etc/hosts: `ip netns exec` shows it there. As Debian's installer has it, its own name is loopback."""
        folder = Path("/etc/netns") / self.namespace
        folder.mkdir(parents=True)
        others = "".join(f"{a} {n}\n" for n, a in self.network.addresses.items() if n != self.name)
        machine = socket.gethostname()
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name} {machine}\n{others}")

    def command(self, *words):
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]

    def run(self, *words, check=True):
        return run(*self.command(*words), check=check)

    def start_sshd(self):
        self.sshd = subprocess.Popen(
            self.command(shutil.which("sshd", path="/usr/sbin:/sbin"), "-D", "-f", self.network.folder / "sshd_config"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while ":22 " not in self.run("ss", "-Hltn").stdout:
            assert time.monotonic() < deadline, f"no sshd on {self.name}"
            time.sleep(0.02)

    def stop_sshd(self):
        if self.sshd:
            self.sshd.kill()
            self.sshd.wait()
            self.sshd = None

    def set_link(self, state):
        run("ip", "-n", self.namespace, "link", "set", "eth0", state)

    def processes(self):
        """{pid: command line} of what runs here, but for the host's services and sshd's sessions."""
        found = {}
        for pid in run("ip", "netns", "pids", self.namespace).stdout.split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                state = re.search(r"\) (\S)", Path(f"/proc/{pid}/stat").read_text()).group(1)
            except OSError:
                continue
            program = os.path.basename(words[0].decode(errors="replace").split(":")[0])
            if state != "Z" and program not in SERVICES:
                found[int(pid)] = b" ".join(words).decode(errors="replace").strip()
        return found

    def ports(self):
        """The ports on which something listens here besides the host's services."""
        listening = [line.split() for line in self.run("ss", "-Hltnp").stdout.splitlines()]
        return [words[3] for words in listening if not SERVICES & set(re.findall('"([^"]+)"', words[-1]))]

    def kill_all(self):
        for pid in run("ip", "netns", "pids", self.namespace).stdout.split():
            run("kill", "-KILL", pid, check=False)

    def remove(self):
        self.stop_sshd()
        self.kill_all()
        run("ip", "netns", "del", self.namespace, check=False)
        shutil.rmtree(Path("/etc/netns") / self.namespace, ignore_errors=True)


class Network:
    """`head`, where the launcher runs, and workers; an ssh configuration that knows them."""

    def __init__(self, num_workers):
        self.prefix = f"dt{os.getpid() % 100000}"
        self.switch = f"{self.prefix}-switch"
        self.folder = Path(tempfile.mkdtemp(prefix="deeptide-hosts-"))
        names = ["head", *(f"worker-{i + 1}" for i in range(num_workers))]
        self.addresses = {name: f"10.83.0.{i + 1}" for i, name in enumerate(names)}
        self.hosts = []
        run("ip", "netns", "add", self.switch)
        try:
            run("ip", "-n", self.switch, "link", "add", "switch", "up", "type", "bridge")
            self._write_ssh_files()
            self.head, *self.workers = [self._add(name, number) for number, name in enumerate(names, 1)]
            for worker in self.workers:
                worker.start_sshd()
        except BaseException:
            self.remove()
            raise

    def _add(self, name, number):
        host = Host(self, name, number)
        self.hosts.append(host)
        return host

    def _write_ssh_files(self):
        key, host_key = self.folder / "key", self.folder / "host_key"
        for path in (key, host_key):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path)
        shutil.copy(f"{key}.pub", self.folder / "authorized_keys")
        Path("/run/sshd").mkdir(exist_ok=True)
        (self.folder / "sshd_config").write_text(
            f"Port 22\nPort {OTHER_SSH_PORT}\nHostKey {host_key}\nAuthorizedKeysFile {self.folder}/authorized_keys\n"
            "PidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
        )
        text = "".join(f"Host {name}\n  HostName {address}\n" for name, address in self.addresses.items())
        (self.folder / "ssh_config").write_text(
            f"{text}Host *\n  IdentityFile {key}\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )

    @property
    def ssh_arguments(self):
        return f"-F {self.folder}/ssh_config"

    def hostfile(self, *slots):
        """The first workers with these numbers of slots."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{w.name} slots={n}\n" for w, n in zip(self.workers, slots, strict=False)))
        return path

    def remove(self):
        for host in self.hosts:
            host.remove()
        run("ip", "netns", "del", self.switch, check=False)
        run("rmdir", "/etc/netns", check=False)  # stays if it holds others'
        shutil.rmtree(self.folder, ignore_errors=True)
