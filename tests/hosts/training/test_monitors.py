# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of two hosts ask for every monitor in one shared folder: each event is written once, with the mean loss."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
PACKAGES = Path(deeptide.__file__).absolute().parents[1]
STEPS = 4
TRAIN = """
import json, sys
import torch
import deeptide

torch.manual_seed(0)
torch.set_num_threads(1)
folder = sys.argv[1]
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": 2}, "wall_clock_breakdown": True}
config |= {name: {"enabled": True, "output_path": folder, "job_name": name} for name in sys.argv[3:]}
config["deeptide"] = {"jsonl_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
engine, *_ = deeptide.initialize(model=torch.nn.Linear(8, 8), config=config)
rank = engine.world.rank
for step in range(int(sys.argv[2])):
    loss = engine(torch.full((2, 8), 1.0 + rank + step)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.monitor.write_events([("Mine/accuracy", 0.5, 8 * (step + 1))])
    print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}))
engine.destroy()
"""


@pytest.mark.parametrize("slots", [(2, 2), pytest.param((1, 1), marks=pytest.mark.slow)])
def test_each_event_is_written_once(hosts, slots):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = hosts.folder / "events"
    folder.mkdir()
    words = [*hosts.python("train.py", TRAIN), str(folder), str(STEPS), "csv_monitor", "tensorboard"]
    env = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
    job = hosts.run(*words, slots=slots, env=env, timeout=240)
    assert job.code == 0, job.output[-2000:] + job.errors[-3000:]
    told = [json.loads(text) for text in re.findall(r"\{.*\}", job.output)]
    assert sorted({line["rank"] for line in told}) == list(range(sum(slots)))
    means = [sum(line["loss"] for line in told if line["step"] == step) / sum(slots) for step in range(STEPS)]
    xs = [2 * sum(slots) * (step + 1) for step in range(STEPS)]

    names = sorted(os.listdir(folder / "csv_monitor"))
    assert len(names) == 9  # loss, rate, norm, five times, and the program's own
    for name in names:
        with (folder / "csv_monitor" / name).open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head[0] == "step" and len(rows) == STEPS, name
        if name == "Train_Samples_train_loss.csv":
            assert [int(x) for x, _ in rows] == xs
            assert [float(value) for _, value in rows] == pytest.approx(means, rel=1e-5)

    assert len(os.listdir(folder / "tensorboard")) == 1
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {name: len(events.Scalars(name)) for name in events.Tags()["scalars"]} == dict.fromkeys(
        events.Tags()["scalars"], STEPS
    )
    assert len(events.Tags()["scalars"]) == 9
    losses = [event.value for event in events.Scalars("Train/Samples/train_loss")]
    assert losses == pytest.approx(means, rel=1e-5)

    lines = [json.loads(text) for text in (folder / "run" / "run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", *["step"] * STEPS]
    assert [line["loss"] for line in lines[1:]] == pytest.approx(means, rel=1e-5)
    assert sorted(os.listdir(folder)) == ["csv_monitor", "run", "tensorboard"]
    hosts.expect_nothing_left()
