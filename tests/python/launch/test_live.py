# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A live job of two ranks: `deeptide top` shows its steps, and `deeptide trace` records some of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import deeptide

SCRIPT = """
import sys, time

sys.path.insert(0, sys.argv[1])
import deeptide
from models import batches, make_model

engine = deeptide.initialize(model=make_model(), config={
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
})[0]
data = batches(4, 4)
ready = False
while True:
    for tokens, targets in data:
        if engine.world.rank == 1:
            time.sleep(0.03)  # the other waits for it
        engine.backward(engine(tokens, targets))
        engine.step()
    if not ready:
        print("ready", flush=True)
        ready = True
"""


def environment():
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def command():
    path = shutil.which("deeptide")
    if not path:
        pytest.skip("the deeptide command is not in PATH")
    return path


def ask(command, *arguments):
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=300, env=environment())


def wait_for_steps(command, job, count):
    """Until every rank has ended so many more steps."""
    last = None
    for line in ask_lines(command, "top", str(job.pid), "--json", "--every", "0.1"):
        steps = min(rank["step"] for rank in json.loads(line)["ranks"])
        last = steps if last is None else last
        if steps >= last + count:
            return
    pytest.fail("the job has ended")


def ask_lines(command, *arguments):
    asked = subprocess.Popen([command, *arguments], stdout=subprocess.PIPE, text=True, env=environment())
    try:
        yield from asked.stdout
    finally:
        asked.terminate()
        asked.communicate(timeout=60)


@pytest.fixture
def job(command, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    models = str(Path(__file__).parents[1])
    started = subprocess.Popen(
        [command, "-q", "--num_ranks", "2", "--python", sys.executable, str(script), models],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        ready = (line for line in started.stdout if "ready" in line)
        assert None not in [next(ready, None) for _ in range(2)]
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=60)


@pytest.mark.costly
def test_top_shows_steps_that_nothing_in_the_configuration_asks_for(command, job):
    lines = [json.loads(line) for line in ask(command, "top", str(job.pid), "-n", "8", "--json").stdout.splitlines()]
    told = [line for line in lines if all("last_step" in rank for rank in line["ranks"])]
    assert told, lines
    last = told[-1]
    assert [rank["rank"] for rank in last["ranks"]] == [0, 1]
    first, late = (rank["last_step"] for rank in last["ranks"])
    assert last["world"] == 2
    assert 0 < first["loss"] < 20
    assert first["norm"] > 0
    assert first["lr"] == 0.01
    assert first["train_batch"] == 8
    assert first["tokens"] > 0
    assert first["memory_bytes"] > 0
    for step in (first, late):
        parts = step["computing_s"] + step["waiting_s"] + step["files_s"] + step["data_s"]
        assert parts == pytest.approx(step["total_s"], rel=1e-3)
        assert step["total_s"] > 0.03
    assert "waiting for rank 1" in first["limit"] or "data" in first["limit"], first["limit"]
    assert late["limit"] == ""
    assert told[0]["ranks"][0]["last_step"]["step"] <= first["step"]

    page = ask(command, "top", str(job.pid), "-n", "1").stdout
    assert f"job {job.pid}: " in page
    assert "| 2 ranks" in page
    assert " samples/s" in page
    assert " tokens/s" in page
    assert "limited by" in page
    assert page.count(" here ") == 2
    assert "\x1b" not in page  # no terminal


def test_trace_records_the_next_steps_of_a_running_job(command, job, tmp_path):
    done = ask(command, "trace", str(job.pid), "--steps", "4", "-o", str(tmp_path / "found"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == [
        "trace.json",
        "trace.rank0.json",
        "trace.rank1.json",
    ]
    events = json.loads((tmp_path / "found" / "trace.json").read_text())["traceEvents"]
    steps = {rank: {e["args"]["step"] for e in events if e["pid"] == rank and e["name"] == "step"} for rank in (0, 1)}
    assert steps[0] == steps[1]
    assert 3 <= len(steps[0]) <= 4

    again = ask(command, "trace", str(job.pid), "--steps", "100000", "--no-wait", "-o", str(tmp_path / "long"))
    assert again.returncode == 0
    assert not (tmp_path / "long").exists()
    wait_for_steps(command, job, 2)  # ranks look for a request once per step
    assert "has ended its timeline" in ask(command, "trace", str(job.pid), "--stop").stdout
    assert (tmp_path / "long" / "trace.rank0.json").is_file()
    assert (tmp_path / "long" / "trace.rank1.json").is_file()
    assert job.poll() is None


@pytest.mark.parametrize("words", [("top", "1"), ("trace", "1"), ("doctor", "1")])
def test_a_job_that_is_none_is_said(command, words):
    done = ask(command, *words)
    assert done.returncode != 0
    assert "no live job" in done.stderr


def test_trace_refuses_a_folder_that_no_rank_could_be_told(command, job):
    done = ask(command, "trace", str(job.pid), "-o", "/" + "x" * 300)
    assert done.returncode != 0
    assert "exceeds 255 bytes" in done.stderr


@pytest.mark.costly
@pytest.mark.parametrize("pause", [pytest.param(False, marks=pytest.mark.slow), True])
def test_doctor_sets_a_running_job_against_the_machine(command, job, tmp_path, pause):
    options = ["--python", sys.executable, "--folder", str(tmp_path), *(["--pause"] if pause else [])]
    done = ask(command, "doctor", str(job.pid), *options)
    assert done.returncode == 0, done.stderr
    head, products, memory, link, drive, between, *notes, verdict = done.stdout.splitlines()
    assert re.match(r"of a step of 0\.\d+ s +this machine +a step has +which needs +and takes", head)
    assert re.match(r"matrix products +[\d.]+ [GT]flop/s +[\d.]+ [kMG]flop +0\.\d+ s +0\.\d+ s computing", products)
    assert re.match(r"memory \(triad\) +[\d.]+ [GT]B/s +[\d.]+ [kMG]B +0\.\d+ s", memory)
    assert re.match(r"link between 2 ranks here +[\d.]+ [MGT]B/s ", link)
    assert re.match(r"drive, write / read +[\d.]+ [MGT]B/s / [\d.]+ [MGT]B/s +- waiting for files", drive)
    assert between.startswith("between steps")
    assert ("beside the job" in "".join(notes)) != pause
    assert re.match(r"limited by (waiting for rank 1, which spends|data:)", verdict), verdict
    wait_for_steps(command, job, 2)  # goes on


def test_doctor_needs_a_job_to_pause(command):
    done = ask(command, "doctor", "--pause")
    assert done.returncode != 0
    assert "--pause and --folder need a job" in done.stderr
