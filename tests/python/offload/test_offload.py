# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_optimizer: where optimizer states lie changes no number, is counted, and fails with a cure."""

import json
import re

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import utils

STEPS = 4
MIB = 1 << 20
OPTIMIZERS = {
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
    "Muon": {"muon_lr": 1e-2, "adam_lr": 1e-3, "ns_steps": 1},
    "OneBitAdam": {"lr": 1e-3, "freeze_step": 3},
    "OneBitLamb": {"lr": 1e-3, "freeze_step": 3},
}


def inputs(rank, step):
    return torch.randn(2, 1100, generator=torch.Generator().manual_seed(100 * rank + step))


def start(world, stage, offload, gas=1, **extra):
    """`offload`: the section offload_optimizer, or deeptide.placement's."""
    zero, deeptide_section = {}, {}
    if offload and "device" in offload:
        zero = {"offload_optimizer": offload}
    elif offload:
        deeptide_section = {"placement": offload}
    config = models.config(stage, gas=gas, zero=zero, deeptide=deeptide_section, **extra)
    return deeptide.initialize(model=models.make_model(kind=models.Wide), config=config, world=world)[0]


def train(engine, steps=STEPS, first=0):
    for step in range(first, first + steps):
        x = inputs(engine.world.rank, step).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x))
        engine.step()


def run(world, stage, offload, bf16, steps=STEPS // 2, **extra):
    engine = start(world, stage, offload, gas=2, bf16=bf16, **extra)
    train(engine, 2 * steps)
    state = models.everything(engine)
    engine.destroy()
    return state


def run_long(world, stage, offload, bf16):
    return run(world, stage, offload, bf16, steps=8, gradient_clipping=0.01)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_offload_is_only_placement(world, stage, bf16, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPTIDE_TEST_APART", "1" if stage in (0, 3) else "0")
    expected = run_ranks(world, run_long, stage, None, bf16)[0]
    tiers = {"device": "2MiB", "cpu": "40%", "nvme": "rest"}
    for offload in (
        {"device": "cpu"},
        {"device": "nvme", "nvme_path": str(tmp_path)},
        {"device": "nvme", "nvme_path": [str(tmp_path / "a"), str(tmp_path / "b")], "ratio": 0.3, "buffer_count": 2},
        {"optimizer_states": tiers, "nvme_path": str(tmp_path)},
    ):
        for state in run_ranks(world, run_long, stage, offload, bf16):
            for name, value in state.items():
                assert torch.equal(value, expected[name]), (offload, name)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.costly
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_any_optimizers_states_lie_in_two_places(type, tmp_path):
    stage = 0 if type.startswith("OneBit") else 2
    optimizer = {"type": type, "params": OPTIMIZERS[type]}
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5}

    def run_it(world, offload):
        return run(world, stage, offload, False, steps=5, optimizer=optimizer)

    expected = run_ranks(2, run_it, None)
    for state, plain in zip(run_ranks(2, run_it, offload), expected, strict=True):
        for name, value in plain.items():
            assert torch.equal(state[name], value), name


def test_the_split_is_exact_to_a_block_counted_and_said(tmp_path, capfd):
    def split(world, ratio):
        offload = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": ratio, "buffer_count": 2}
        engine = start(world, 2, offload, bf16=True)
        train(engine, 1)
        lines = {line.role: line for line in engine.memory()}
        text = engine._core.summary()
        engine.destroy()
        return text, lines["optimizer states"].predicted_bytes, lines["optimizer states"].measured_bytes

    total = 3 * 4 * (3 * (1100 * 1100 + 1100)) / MIB  # master and two moments, fp32
    for ratio in (0.25, 0.5, 1.0):
        text, predicted, measured = run_ranks(1, split, ratio)[0]
        found = re.search(r"optimizer states: .*\(([\d.]+) MiB\), ([\d.]+) % in files of .* \(([\d.]+) MiB", text)
        assert found, text
        in_memory, _, in_files = map(float, found.groups())
        assert in_files + in_memory == pytest.approx(total, rel=0.01)
        assert abs(in_files - ratio * total) <= 4.1
        assert predicted == pytest.approx(measured, rel=0.02)
        assert measured / MIB <= in_memory + 6 * 4 + 0.1


AUTO = {"device": "nvme", "ratio": "auto", "buffer_count": 2}


def measured(world, folder, offload):
    """The choice of "auto", and what the checkpoint of the trained engine and a resumed one say."""
    engine = start(world, 2, offload, gas=2, bf16=True)
    ratio, text = engine._core.offload_ratio(), engine._core.summary()
    memory = {line.role: line.measured_bytes for line in engine.memory()}["optimizer states"]
    train(engine)
    state = models.everything(engine)
    engine.save_checkpoint(folder, tag="saved")
    engine.destroy()
    resumed = start(world, 2, {**offload, "ratio": 0.5}, gas=2, bf16=True)
    resumed.load_checkpoint(folder, tag="saved")
    assert resumed._core.offload_ratio() is None
    again = models.everything(resumed)
    resumed.destroy()
    return ratio, text, memory, state, again


def test_an_automatic_ratio_is_measured_said_recorded_and_changes_no_number(tmp_path, capfd):
    expected = run_ranks(2, run, 2, None, True)[0]
    offload = {**AUTO, "nvme_path": str(tmp_path / "swap")}
    results = run_ranks(2, measured, str(tmp_path), offload)
    ratio = results[0][0]
    assert 0.0 <= ratio <= 1.0
    assert round(100 * ratio) == pytest.approx(100 * ratio)
    total = 3 * 4 * 3 * (1100 * 1100 + 1100) / 2
    for own, text, memory, state, again in results:
        assert own == ratio, "all ranks take the least"
        assert f"ratio: {ratio:.2f}, the most whose transfers a step hides" in text
        assert memory == pytest.approx(total * (1 - ratio) + 6 * 4 * MIB, abs=4 * MIB) or memory == 24 * MIB
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
            assert torch.equal(again[name], value), name
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert f'"offload_ratio": {ratio}'.replace(" ", "") in json.dumps(manifest).replace(" ", "").replace("\\", "")
    printed = "".join(capfd.readouterr())
    said = f"was measured as {ratio:.2f} when this was saved; this run's configuration gives its own"
    assert said in printed, printed


def test_a_plan_has_the_most_that_an_automatic_ratio_may_take(tmp_path):
    def plan(ratio):
        zero = {"offload_optimizer": {**AUTO, "nvme_path": str(tmp_path), "ratio": ratio}}
        return deeptide.plan(models.make_model(kind=models.Wide), models.config(2, zero=zero)).lines["optimizer states"]

    auto, none, all_of_it = plan("auto"), plan(0.001), plan(1.0)
    assert auto.file_bytes == all_of_it.file_bytes > 0
    assert auto.memory_bytes == pytest.approx(none.memory_bytes, abs=4 * MIB)


def checkpoint(world, folder, save, load):
    engine = start(world, 2, save)
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(world, 2, load)
    engine.load_checkpoint(folder)
    train(engine, 2, first=2)
    state = models.everything(engine)
    engine.destroy()
    return state


@pytest.mark.costly
def test_checkpoints_cross_placements(tmp_path):
    files = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    plain = run_ranks(2, checkpoint, str(tmp_path / "plain"), None, None)[0]
    for name, pair in {"out": (None, files), "in": (files, None), "both": (files, {**files, "ratio": 0.5})}.items():
        for state in run_ranks(2, checkpoint, str(tmp_path / name), *pair):
            for key, value in state.items():
                assert torch.equal(value, plain[key]), (name, key)


def write_states(world, folder):
    engine = start(world, 2, {"device": "nvme", "nvme_path": folder})
    train(engine, 1)
    weight = engine.module.layers[1].weight
    utils.safe_set_full_optimizer_state(weight, torch.full((1100, 1100), 0.5), "exp_avg")
    value = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    engine.destroy()
    return bool((value == 0.5).all())


def test_states_in_files_are_read_and_written_by_parameter(tmp_path):
    assert run_ranks(2, write_states, str(tmp_path)) == [True, True]


def test_a_full_disk_is_named_before_training(mount_disk):
    small = mount_disk("8m")
    words = rf"cannot reserve \d+ bytes in '{small}': No space left on device.*nvme_path"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(1, run, 2, {"device": "nvme", "nvme_path": str(small)}, False)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RuntimeError, match=rf"cannot make the folder in '{blocker}/swap'"):
        run_ranks(1, run, 2, {"device": "nvme", "nvme_path": str(blocker / "swap")}, False)


@pytest.mark.parametrize(
    ("stage", "offload", "words"),
    [
        (2, {"device": "nvme"}, 'offload_optimizer.device "nvme" needs nvme_path'),
        (2, {"device": "disk"}, "offload_optimizer.device"),
        (2, {"device": "nvme", "nvme_path": "/tmp", "ratio": 1.5}, "offload_optimizer.ratio"),
        (2, {"device": "nvme", "nvme_path": 7}, "offload_optimizer.nvme_path"),
        (2, {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 0}, "offload_optimizer.buffer_count"),
    ],
)
def test_bad_values_are_named(stage, offload, words):
    with pytest.raises(deeptide.ConfigError, match=re.escape(words)):
        deeptide.initialize(model=nn.Linear(2, 2), config=models.config(stage, zero={"offload_optimizer": offload}))
