# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stages and shared layers over two hosts train as the whole model does, and a rank that fails is named on both."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
ROOT = Path(__file__).resolve().parents[3]
ROOMS = [ROOT / "tests" / "python", *(ROOT / "tests" / "python" / room for room in ("tensor", "pipeline"))]
PACKAGES = Path(deeptide.__file__).absolute().parents[1]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(map(str, [PACKAGES, *ROOMS])), "OMP_NUM_THREADS": "1"}

TRAIN = """
import json, os, signal, sys, time
import torch
import deeptide
import meshes

torch.set_num_threads(1)
pipeline, tensor = map(int, sys.argv[1:3])
end = sys.argv[3]
settings = meshes.config("plain", 1, pipeline, tensor, deeptide={"error_grace": 1})
engine = meshes.start(None, "plain", settings)
losses, norms = meshes.steps(engine, "plain", 2)
print("trained", json.dumps([losses, norms]), flush=True)


def bad_batches():
    raise ValueError("bad batch")
    yield


if end == "killed" and engine.global_rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if end != "trained":
    try:
        engine.train_batch(bad_batches()) if engine.global_rank == 3 else meshes.steps(engine, "plain", 1, begin=2)
    except ValueError:
        time.sleep(10)  # with the engine
    except deeptide.CommError as error:
        print("ended by", error, flush=True)
"""


def trained(text):
    return [json.loads(line.split("trained ", 1)[1]) for line in text.splitlines() if "trained " in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses and norms of two data ranks on one machine, without a mesh."""
    program = tmp_path_factory.mktemp("whole") / "train.py"
    program.write_text(TRAIN)
    words = [
        shutil.which("deeptide"),
        "-q",
        "--num_ranks",
        "2",
        "--python",
        sys.executable,
        program,
        "1",
        "1",
        "trained",
    ]
    done = subprocess.run(
        list(map(str, words)), env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return trained(done.stdout)[0]


@pytest.mark.rotates
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=["pipeline", "tensor"])
def test_a_mesh_over_hosts_trains_as_the_whole_model(hosts, whole, mesh):
    job = hosts.run(*hosts.python("train.py", TRAIN), *mesh, "trained", slots=(2, 2), env=ENVIRONMENT, timeout=300)
    assert job.code == 0, job.output[-2000:] + job.errors[-2000:]
    found = trained(job.output)
    assert len(found) == 4
    for losses, norms in found:
        assert losses == pytest.approx(whole[0], rel=1e-5)
        assert norms == pytest.approx(whole[1], rel=1e-4)
    hosts.expect_nothing_left()


@pytest.mark.rotates
def test_a_rank_that_fails_is_named_on_all_hosts_with_its_stage(hosts):
    job = hosts.run(*hosts.python("train.py", TRAIN), "2", "1", "raised", slots=(2, 2), env=ENVIRONMENT, timeout=300)
    ends = [line for line in job.output.splitlines() if "ended by" in line]
    assert len(ends) == 3, job.output + job.errors
    assert all("rank 3 (pipeline 1, data 1) raised ValueError" in line for line in ends), ends
    hosts.expect_nothing_left()


@pytest.mark.rotates
def test_a_rank_that_is_killed_ends_the_stages_on_all_hosts(hosts):
    job = hosts.run(*hosts.python("train.py", TRAIN), "2", "1", "killed", slots=(2, 2), env=ENVIRONMENT, timeout=300)
    assert job.code != 0
    assert "rank 3 (pipeline 1, data 1) on worker-2 was killed by signal 9" in job.errors
    hosts.expect_nothing_left()
