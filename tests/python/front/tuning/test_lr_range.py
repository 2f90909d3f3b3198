# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide lr-range`: a script's first engine trains with a growing rate, and rank 0 tells what came of it."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

import deeptide
from deeptide._tuning.lr_range import fastest_fall

SCRIPT = """
    import sys
    import torch
    import deeptide

    torch.manual_seed(0)
    STEPS, OWN_BACKWARD, GAS = int(sys.argv[1]), "own" in sys.argv, 2
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 7.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 7.0, "warmup_num_steps": 5}},
    }
    engine, *_ = deeptide.initialize(model=model, config=config)
    x = torch.randn(16, 8)
    for step in range(STEPS):
        for _ in range(GAS):
            loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True)) + engine.world.rank
            loss.backward() if OWN_BACKWARD else engine.backward(loss)
            outcome = engine.step()
    print("the script went on")
"""


def run(tmp_path, *words, script=("10",), ranks=2):
    command = shutil.which("deeptide")
    if not command:
        pytest.skip("the deeptide command is not in PATH")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    words = ("lr-range", "--out", str(tmp_path / "out"), *words)
    job = ("--quiet", "--no_rank_prefix", "--num_ranks", str(ranks), "--python", sys.executable)
    return subprocess.run(
        [command, *words, *job, str(tmp_path / "train.py"), *script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "lr_range.jsonl").read_text().splitlines()]


@pytest.mark.costly
@pytest.mark.parametrize("linear", [False, True])
def test_rates_grow_from_one_end_to_the_other_and_the_script_ends(tmp_path, linear):
    done = run(tmp_path, "--min-lr", "1e-3", "--max-lr", "1e1", "--steps", "9", *(["--linear"] if linear else []))
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    expected = [1e-3 + i * (10 - 1e-3) / 8 if linear else 10 ** (-3 + i / 2) for i in range(9)]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert "the script went on" not in done.stdout
    assert "Losses:  " in done.stdout


@pytest.mark.costly
def test_losses_are_those_of_steps_with_these_rates(tmp_path):
    import torch

    assert run(tmp_path, "--min-lr", "1e-3", "--max-lr", "1e-1", "--steps", "5").returncode == 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for row in rows_of(tmp_path):
        optimizer.param_groups[0]["lr"] = row["lr"]
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        assert row["loss"] == pytest.approx(loss.item() + 0.5, rel=1e-4)  # ranks add 0 and 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.costly
def test_a_script_that_ends_before_the_test_is_told(tmp_path):
    done = run(tmp_path, "--steps", "40", script=("6",), ranks=1)
    assert done.returncode == 0, done.stderr
    assert "The script ended after 6 of 40 steps" in done.stdout
    assert len(rows_of(tmp_path)) == 6


@pytest.mark.costly
def test_losses_that_nobody_sees_are_refused(tmp_path):
    done = run(tmp_path, script=("5", "own"), ranks=1)
    assert done.returncode != 0
    assert "call engine.backward(loss) in place of loss.backward()" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--min-lr", "1", "--max-lr", "0.1"), "--min-lr 1 is not below --max-lr 0.1"),
        (("--min-lr", "0"), "--min-lr"),
        (("--steps", "1"), "--steps"),
        (("--step", "5"), "--step"),
    ],
)
def test_ranges_are_refused_if(tmp_path, words, text):
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert text in done.stderr


def test_fastest_fall_is_before_the_minimum_and_none_where_nothing_falls():
    rates = [10 ** (-4 + i / 10) for i in range(41)]
    losses = [2 - math.tanh(8 * (i / 40 - 0.5)) + (0.5 * (i - 34) ** 2 if i > 34 else 0) for i in range(41)]
    assert abs(fastest_fall(rates, losses) - 20) <= 1
    assert abs(fastest_fall(rates, losses[:35] + [float("nan")] * 6) - 20) <= 1
    assert fastest_fall(rates, [float(i) for i in range(41)]) is None
    assert fastest_fall(rates, [float("nan")] * 41) is None
