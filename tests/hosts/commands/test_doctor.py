# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide doctor RUN --hostfile`: the link between two hosts is measured by ranks on both, and a slow one is seen."""

import re
import sys

import pytest
from test_monitors import PACKAGES, TRAIN

RATE = 200  # Mbit/s of the slow link


def doctor(hosts, folder):
    """The lines of the report on a recorded job of two hosts."""
    words = ["doctor", folder / "run", "--folder", folder, "--python", sys.executable]
    words += ["--hostfile", hosts.network.hostfile(1, 1), f"--launcher_args={hosts.network.ssh_arguments}"]
    job = hosts.run_bare(*words, timeout=240)
    assert job.code == 0, job.output + job.errors
    return job.output


def link_rate(text):
    """Bytes per second."""
    line = re.search(r"link between 2 ranks on 2 hosts\s+([\d.]+) ([kMG])B/s", text)
    assert line, text
    return float(line[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[line[2]]


@pytest.mark.rotates
def test_doctor_measures_the_link_between_hosts(hosts):
    folder = hosts.folder / "events"
    folder.mkdir()
    hosts.environment |= {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
    words = [*hosts.python("train.py", TRAIN), str(folder), "4"]
    job = hosts.run(*words, slots=(1, 1), timeout=240)
    assert job.code == 0, job.output[-2000:] + job.errors[-3000:]
    free = link_rate(doctor(hosts, folder))
    for worker in hosts.workers[:2]:
        bucket = ["rate", f"{RATE}mbit", "burst", "32kb", "latency", "2s"]
        if worker.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket, check=False).returncode != 0:
            pytest.skip("no tbf in this kernel")
    slow = link_rate(doctor(hosts, folder))
    assert slow < RATE * 1e6 / 8 * 1.1, "no more than the link lets through"
    assert slow < free
    hosts.expect_nothing_left()
