# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's GPT over several hosts prints the losses of one machine, over every transport."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(deeptide.__file__).absolute().parents[1]


def config(world, folder):
    """The demo's, with a batch that `world` divides."""
    text = (ROOT / "examples/gpt/ds_config_fp32.json").read_text()
    path = Path(folder) / "ds_config.json"
    path.write_text(text.replace('"train_batch_size": 8', f'"train_batch_size": {2 * world}'))
    return path


def program(world, folder):
    return [
        *("--python", sys.executable, ROOT / "examples/gpt/gpt.py"),
        *("--config", config(world, folder), "--out", Path(folder) / "out", "--steps", "3", "--seed", "3"),
        *("--threads", "1", "--eval-every", "1000", "--save-every", "1000", "--print-losses"),
    ]


ENVIRONMENT = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}


def losses(text):
    return re.findall(r"step \d+ loss ([0-9.]+)", text)


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """{world: losses}, each computed once."""
    known = {}

    def run(world):
        if world not in known:
            words = [
                shutil.which("deeptide"),
                "-q",
                "--num_ranks",
                world,
                *program(world, tmp_path_factory.mktemp("one")),
            ]
            done = subprocess.run(
                list(map(str, words)), env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=400
            )
            assert done.returncode == 0, done.stderr[-2000:]
            known[world] = losses(done.stdout)
            assert len(known[world]) == 3
        return known[world]

    return run


def train(request, hosts, launcher, slots):
    words = program(sum(slots), hosts.folder)
    env = dict(ENVIRONMENT, PDSH_SSH_ARGS_APPEND=hosts.network.ssh_arguments)
    if launcher == "ssh":
        return hosts.run(*words, slots=slots, env=env, timeout=400)
    if launcher == "pdsh":
        return hosts.run("--launcher", "pdsh", *words, ssh=False, slots=slots, env=env, timeout=400)
    if launcher == "slurm":
        job = hosts.start_slurm(request.getfixturevalue("slurm"), *words, slots=slots, more=env)
        job.code = job.wait(400)
        return job
    return hosts.run_mpi(launcher, *words, slots=slots, timeout=400, more=env)


def way(launcher, slots, marks=()):
    return pytest.param(launcher, slots, marks=marks, id=f"{launcher}-{len(slots)}x{slots[0]}")


EVERY_WAY = [way(launcher, (2, 2)) for launcher in ("ssh", "pdsh", "openmpi", "mpich", "impi", "slurm")]
EVERY_WAY += [way("ssh", (1, 1, 1))]
EVERY_WAY += [way(launcher, (1, 1, 1), pytest.mark.slow) for launcher in ("pdsh", "openmpi")]


@pytest.mark.rotates
@pytest.mark.parametrize(("launcher", "slots"), EVERY_WAY)
def test_losses_are_those_of_one_machine(request, hosts, one_machine, launcher, slots):
    if launcher == "pdsh" and not shutil.which("pdsh"):
        pytest.skip("pdsh is not installed")
    job = train(request, hosts, launcher, slots)
    assert job.code == 0, job.output[-2000:] + job.errors[-2000:]
    assert losses(job.output) == one_machine(sum(slots)), job.errors
    hosts.expect_nothing_left()
