# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide doctor JOB`: what its sentence says of steps of each kind, and of a recorded run."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_processes
from models import batches, make_model

import deeptide
from deeptide._commands import doctor as doctor
from deeptide._commands.doctor_machine import Machine, measure
from deeptide._commands.run_record import Run

MACHINE = Machine(flops=100e9, memory_bytes=10e9, link_bytes=1e9, write_bytes=1e9, read_bytes=2e9)
BUSY = doctor.Step(
    total=1.0,
    computing=0.9,
    optimizer=0.1,
    waiting=0.05,
    files=0.0,
    data=0.05,
    flops=60e9,
    moved_bytes=2e9,
    sent_bytes=10e6,
    ranks=2,
    limit="limited by compute: computing: bf16; of a step's 1 s: compute 90 %",
)


def verdict(**changes):
    return doctor.verdict(dataclasses.replace(BUSY, **changes), MACHINE)


def test_products_near_the_peak_are_computing():
    assert verdict().startswith("limited by compute: 90 % of a step at 75 Gflop/s of this machine's 100 Gflop/s: bf16")


def test_transfers_beyond_products_are_memory():
    assert verdict(moved_bytes=7e9).startswith("limited by memory: operators move 7 GB in 0.8 s, of which this machine")


def test_an_optimizer_beyond_the_operators_is_memory():
    assert verdict(optimizer=0.6).startswith("limited by memory: the optimizer takes 0.6 s of the 0.9 s")


def test_operators_that_need_little_and_take_long_are_neither():
    text = verdict(flops=6e9, moved_bytes=1e9)
    assert text.startswith("limited by what is neither product nor transfer: operators take 0.8 s, 90 % of a step, for")
    assert "engine.compile()" in text and "other processes" in text


def test_waits_that_the_link_does_not_explain_are_the_ranks_turns():
    line = "limited by network: 0.4 s of a step wait for transfers between ranks; of a step's 1 s: compute 60 %"
    assert verdict(limit=line, waiting=0.4).startswith("limited by the ranks' turns, not by the link: they wait 0.4 s")
    assert verdict(limit=line, waiting=0.4, sent_bytes=0.3e9) == line.partition("; of a step's")[0]


@pytest.mark.parametrize("cause", ["waiting for rank 3, which computes", "data: 0.5 s", "files: 0.5 s wait for files"])
def test_the_engines_own_line_counts_where_ranks_wait(cause):
    text = verdict(limit=f"limited by {cause}; of a step's 1 s: compute 50 %")
    assert text.startswith(f"limited by {cause}")
    assert ("this drive does 1 GB/s written and 2 GB/s read" in text) == cause.startswith("files")


def rank_that_records(folder):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": 2,
        "deeptide": {"jsonl_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}},
    }
    engine = deeptide.initialize(model=make_model(), config=config)[0]
    for tokens, targets in batches(6, 4):
        engine.backward(engine(tokens, targets))
        engine.step()


def test_a_record_tells_what_the_table_needs(tmp_path):
    run_processes(2, rank_that_records, str(tmp_path))
    step = doctor.step_of_record(Run(tmp_path / "run"))
    assert step.ranks == 2 and step.dtype == "float32" and step.limit.startswith("limited by ")
    assert step.total == pytest.approx(step.computing + step.waiting + step.files + step.data, rel=0.02)
    model = make_model()
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    tokens = batches(1, 4)[0][0].numel()
    assert 2 * products * tokens < step.flops < 20 * products * tokens
    assert step.moved_bytes > 4 * sum(p.numel() for p in model.parameters())
    lines = doctor.table(step, MACHINE).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "matrix products",
        "memory (triad)",
        "link between 2 ranks here",
        "drive, write / read",
        "between steps",
    ]


def test_a_record_without_times_is_said(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"kind": "start"}\n')
    with pytest.raises(ValueError, match="tells no times"):
        doctor.step_of_record(Run(tmp_path))


@pytest.mark.slow
def test_the_machine_is_measured_by_ranks_at_once(tmp_path):
    command = shutil.which("deeptide")
    if not command:
        pytest.skip("the deeptide command is not in PATH")
    machine = measure(command, ["--num_ranks", "2"], "float32", str(tmp_path))
    assert min(dataclasses.astuple(machine)) > 1e6
    assert list(tmp_path.iterdir()) == []
    alone = measure(command, ["--num_ranks", "1"], "bfloat16", str(tmp_path))
    assert alone.link_bytes == 0 and alone.flops > 1e6


@pytest.mark.slow
def test_the_command_takes_a_recorded_run(tmp_path):
    command = shutil.which("deeptide")
    if not command:
        pytest.skip("the deeptide command is not in PATH")
    run_processes(2, rank_that_records, str(tmp_path))
    words = [command, "doctor", str(tmp_path / "run"), "--python", sys.executable, "--folder", str(tmp_path)]
    package = str(Path(deeptide.__file__).absolute().parents[1])
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": package})
    assert done.returncode == 0, done.stderr
    head, *_, verdict_line = done.stdout.splitlines()
    assert head.startswith("of a step of 0.") and verdict_line.startswith("limited by ")
    assert "beside the job" not in done.stdout
