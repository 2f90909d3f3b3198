# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide bench comm` and `deeptide doctor` over real hosts."""

import json
import sys
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
ENVIRONMENT = {"PYTHONPATH": str(Path(deeptide.__file__).absolute().parents[1]), "OMP_NUM_THREADS": "1"}
WORDS = ("--json", "--maxsize", "16K", "--trials", "2", "--python", sys.executable)


@pytest.mark.parametrize(
    ("launcher", "slots", "path"),
    [("ssh", (2, 2), "two levels"), ("ssh", (2, 1), "c10d"), ("openmpi", (2, 2), "two levels")],
    ids=["ssh-2x2", "ssh-2+1", "openmpi-2x2"],
)
def test_collectives_between_hosts_are_right_and_tell_their_path(hosts, launcher, slots, path):
    options = {"slots": slots, "timeout": 120, "command": ("bench", "comm")}
    if launcher == "ssh":
        job = hosts.run(*WORDS, env=ENVIRONMENT, **options)
    else:
        job = hosts.run_mpi(launcher, *WORDS, more=ENVIRONMENT, **options)
    assert job.code == 0, job.output[-2000:] + job.errors[-2000:]
    rows = [json.loads(line) for line in job.output.splitlines()]
    assert len(rows) == 5 * 2
    assert {(row["ranks"], row["hosts"], row["path"]) for row in rows} == {(sum(slots), 2, path)}
    hosts.expect_nothing_left()


def test_doctor_tells_which_hosts_can_be_used(hosts):
    hosts.workers[1].stop_sshd()
    words = ("doctor", "-H", hosts.network.hostfile(2, 2), "--launcher_args", hosts.network.ssh_arguments)
    job = hosts.run_bare(*words, "--python", "/bin/true")
    assert job.code == 1
    assert "ok    ssh worker-1: the login works without a password; deeptide " in job.output
    lost = next(line for line in job.output.splitlines() if line.startswith("fail  ssh worker-2: "))
    assert "Connection refused" in lost and ". Cure: " in lost
