# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Monitors write real files, once, on rank 0; the packages' own readers read them back."""

import csv
import importlib.util
import json
import math
import os
import struct
import zipfile

import pytest
import torch
from conftest import run_processes
from models import batches, make_model

import deeptide
from deeptide.monitor import MonitorMaster

NAMES = ["Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm"]


def config_of(folder, **sections):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **{
            name: {"enabled": True, "output_path": str(folder), "job_name": name, **more}
            for name, more in sections.items()
        },
    }


def train(config, steps=3, world=None, first=0):
    engine = deeptide.initialize(model=make_model(), config=config, world=world)[0]
    losses = []
    for tokens, targets in batches(first + steps, 4)[first:]:
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return engine, losses


def read_csv(folder, name):
    with open(os.path.join(folder, "csv_monitor", name.replace("/", "_") + ".csv"), newline="") as file:
        return list(csv.reader(file))


def read_tensorboard(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(os.path.join(folder, "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_csv_files_hold_each_step(tmp_path):
    engine, losses = train(config_of(tmp_path, csv_monitor={}))
    rows = read_csv(tmp_path, "Train/Samples/train_loss")
    assert rows[0] == ["step", "train_loss"]
    assert [int(x) for x, _ in rows[1:]] == [4, 8, 12]  # samples
    assert [float(value) for _, value in rows[1:]] == pytest.approx(losses)
    assert read_csv(tmp_path, "Train/Samples/lr")[1:] == [["4", "0.01"], ["8", "0.01"], ["12", "0.01"]]
    engine.monitor.write_events([("Mine/accuracy", 0.5, 12)])
    assert read_csv(tmp_path, "Mine/accuracy") == [["step", "accuracy"], ["12", "0.5"]]


def test_tensorboard_files_are_read_back_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    engine, losses = train(config_of(tmp_path, tensorboard={}))
    engine.monitor.write_events([("Mine/accuracy", 0.5, 12)])
    found = read_tensorboard(tmp_path)
    assert set(found) == {*NAMES, "Mine/accuracy"}
    assert [x for x, _ in found["Train/Samples/train_loss"]] == [4, 8, 12]
    assert [value for _, value in found["Train/Samples/train_loss"]] == pytest.approx(losses)


def test_times_are_events_with_the_breakdown(tmp_path):
    config = config_of(tmp_path, csv_monitor={}) | {"wall_clock_breakdown": True}
    engine, _ = train(config)
    for part in ("forward", "backward", "backward_inner", "backward_allreduce", "step"):
        values = [float(value) for _, value in read_csv(tmp_path, f"Train/Samples/elapsed_time_ms_{part}")[1:]]
        assert len(values) == 3 and all(math.isfinite(value) for value in values)
        if part in ("forward", "backward", "step"):
            assert min(values) > 0
    assert engine.timers("fwd").elapsed() > 0 and engine.timers("bwd").mean() > 0


def rank_of_two(folder):
    config = config_of(folder, csv_monitor={}, tensorboard={})
    config["deeptide"] = {"jsonl_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine, losses = train(config)
    engine.monitor.write_events([("Mine/accuracy", 0.5, 24)])
    return losses


def test_ranks_write_once_and_the_mean_of_their_losses(tmp_path):
    pytest.importorskip("tensorboard")
    run_processes(2, rank_of_two, str(tmp_path))
    assert len(read_csv(tmp_path, "Train/Samples/train_loss")) == 4
    assert len(read_csv(tmp_path, "Mine/accuracy")) == 2
    assert len(os.listdir(tmp_path / "tensorboard")) == 1
    assert len(read_tensorboard(str(tmp_path))["Train/Samples/lr"]) == 3
    lines = [json.loads(text) for text in (tmp_path / "run/run.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "step", "step", "step"]


def test_losses_are_the_mean_over_ranks(tmp_path):
    from conftest import run_ranks

    def rank(world):
        return train(config_of(tmp_path, csv_monitor={}), world=world, first=3 * world.rank)[1]

    losses = run_ranks(2, rank)
    written = [float(value) for _, value in read_csv(tmp_path, "Train/Samples/train_loss")[1:]]
    assert written == pytest.approx([(a + b) / 2 for a, b in zip(*losses, strict=True)], rel=1e-6)


def records_of(log):
    """The records of a file of W&B: LevelDB's log format, behind seven bytes of its own. wandb 0.31 has no reader."""
    place, block, record, found = 7, 1 << 15, b"", []
    while place + 7 <= len(log):
        left = block - place % block
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, place)
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(record)
            record = b""
    return found


def losses_of(program, folder):
    """Those that the function prints last, in a process that the package can change as it likes."""
    return json.loads(run_processes(1, program, str(folder))[0].stdout.splitlines()[-1])


def wandb_run(folder):
    engine, losses = train(config_of(folder) | {"wandb": {"enabled": True, "project": "tide"}})
    engine.monitor.wandb_monitor.run.finish()
    print(json.dumps(losses))


@pytest.mark.costly
def test_wandb_run_is_read_back_offline(tmp_path, monkeypatch):
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    losses = losses_of(wandb_run, tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    seen = []
    for data in records_of(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
        seen += [float(value) for name, value in items if name == "Train/Samples/train_loss"]
    assert seen == pytest.approx(losses)


def comet_run(folder):
    import comet_ml

    section = {"enabled": True, "online": False, "samples_log_interval": 8, "mode": "create", "project": "tide"}
    engine, losses = train(config_of(folder) | {"comet": section})
    experiment = engine.monitor.comet_monitor.experiment
    assert isinstance(experiment, comet_ml.CometExperiment)
    experiment.end()
    print(json.dumps(losses))


@pytest.mark.costly
@pytest.mark.skipif(importlib.util.find_spec("comet_ml") is None, reason="needs comet_ml")
def test_comet_takes_points_as_often_as_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
    losses = losses_of(comet_run, tmp_path)
    (archive,) = tmp_path.glob("*.zip")
    seen = []
    with zipfile.ZipFile(archive) as files:
        for line in files.read("messages.json").decode().splitlines():
            metric = json.loads(line).get("payload", {}).get("metric", {})
            if metric.get("metricName") == "Train/Samples/train_loss":
                seen.append((metric["step"], float(metric["metricValue"])))
    assert seen == [(4, pytest.approx(losses[0])), (12, pytest.approx(losses[2]))]


def test_a_package_that_is_missing_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    config = deeptide.Config.from_text('{"train_batch_size": 1, "wandb": {"enabled": true}}')
    with pytest.raises(ImportError, match=r"wandb\.enabled: .*pip install wandb"):
        MonitorMaster(config, 0)
    assert MonitorMaster(config, 1).enabled  # other ranks write nothing, and need nothing


def test_nothing_is_kept_where_nobody_asks():
    engine = deeptide.initialize(model=make_model(), config=config_of("nowhere"))[0]
    assert not engine.monitor.enabled
    engine.backward(engine(*batches(1, 4)[0]))
    engine.step()
    assert engine._core.take_events() == [] and engine.limit() == "" and engine._core.step_times().total == 0
    assert torch.is_grad_enabled()
