# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_param: where the shards of parameters lie changes no number, is counted, and fails with a cure."""

import re

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import utils

STEPS = 20
MIB = 1 << 20


class Net(nn.Module):
    """Blocks whose shards are some whole blocks of 4 MiB and a part in fp32 at world 1, and less than one at others."""

    def __init__(self, width=1100, layers=3, frozen=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(7))
        self.layers[1].weight.requires_grad_(not frozen)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale.sum()
        return x.float().square().mean()


def inputs(rank, step, width):
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * rank + step))


def start(world, offload, gas=1, sizes=None, **extra):
    limits = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 10}
    zero = {**limits, "stage3_gather_16bit_weights_on_model_save": True, **offload}
    config = models.config(3, gas=gas, zero=zero, **extra)
    model = models.make_model(kind=Net, **(sizes or {}))
    return deeptide.initialize(model=model, config=config, world=world)[0]


def train(engine, steps=STEPS, first=0):
    width = engine.module.layers[0].weight.shape[0]
    losses = []
    for step in range(first, first + steps):
        x = inputs(engine.world.rank, step, width).to(engine.module.scale.dtype)
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def placements(folder):
    files = {"device": "nvme", "nvme_path": str(folder)}
    striped = {"device": "nvme", "nvme_path": [str(folder / "a"), str(folder / "b")]}
    few = {**striped, "buffer_count": 1, "buffer_size": 1000, "max_in_cpu": 1_100_000}
    return [
        {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        {"offload_param": files},
        {"offload_param": few, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), "ratio": 0.5}},
        {"offload_param": files, "offload_optimizer": files, "overlap_comm": False},
    ]


def run(world, offload, bf16, frozen=False):
    engine = start(world, offload, gas=2, bf16=bf16, sizes={"frozen": frozen})
    losses = train(engine)
    with torch.no_grad():  # evaluation has a plan of its own
        losses.append(engine(inputs(0, 0, 1100).to(engine.module.scale.dtype)).item())
    state = models.everything(engine)
    engine.destroy()
    return losses, state


def assert_equal_states(state, expected, where):
    assert state.keys() == expected.keys(), where
    for name, value in state.items():
        assert torch.equal(value, expected[name]), (where, name)


@pytest.mark.costly
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_offload_is_only_placement(world, bf16, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPTIDE_TEST_APART", "0" if bf16 else "1")
    frozen = world == 2
    expected = run_ranks(world, run, {}, bf16, frozen)
    for offload in placements(tmp_path):
        for (losses, state), (plain_losses, plain_state) in zip(
            run_ranks(world, run, offload, bf16, frozen), expected, strict=True
        ):
            assert losses == plain_losses, offload
            assert_equal_states(state, plain_state, offload)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def checkpoint(world, folder, save, load, bf16):
    engine = start(world, save, bf16=bf16)
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(world, load, bf16=bf16)
    engine.load_checkpoint(folder)
    train(engine, 2, first=2)
    state = models.everything(engine)
    engine.destroy()
    return state


@pytest.mark.costly
@pytest.mark.parametrize("bf16", [False, True])
def test_checkpoints_cross_placements(bf16, tmp_path):
    files = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    both = {**files, "offload_optimizer": files["offload_param"]}
    plain = run_ranks(2, checkpoint, str(tmp_path / "plain"), {}, {}, bf16)[0]
    for name, pair in {"out": ({}, files), "in": (files, {}), "all": (files, both)}.items():
        for state in run_ranks(2, checkpoint, str(tmp_path / name), *pair, bf16):
            assert_equal_states(state, plain, name)


def write_parameters(world, offload, bf16):
    engine = start(world, offload, bf16=bf16)
    train(engine, 1)
    weight = engine.module.layers[1].weight
    with torch.no_grad():
        weight.mul_(0.5)
        engine.module.layers[0].bias.copy_(torch.arange(1100) / 1100)
    with deeptide.zero.GatheredParameters([engine.module.layers[2].weight], modifier_rank=0), torch.no_grad():
        engine.module.layers[2].weight.fill_(0.25 + world.rank)
    engine(inputs(0, 1, 1100).to(engine.module.scale.dtype))  # reads what was written
    master = utils.safe_get_full_fp32_param(weight)
    train(engine, 1, first=1)
    utils.safe_set_full_fp32_param(weight, master)
    utils.safe_set_full_optimizer_state(weight, torch.full((1100, 1100), 0.5), "exp_avg")
    train(engine, 2, first=2)
    state = models.everything(engine)
    engine.destroy()
    return state


@pytest.mark.parametrize("bf16", [False, True])
def test_what_programs_write_reaches_the_files(bf16, tmp_path):
    expected = run_ranks(2, write_parameters, {}, bf16)[0]
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for state in run_ranks(2, write_parameters, offload, bf16):
        assert_equal_states(state, expected, bf16)


def export(world, offload, folder):
    engine = start(world, offload, bf16=True)
    train(engine, 1)
    engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()


def test_an_export_reads_the_files(tmp_path):
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    texts = []
    for name, where in {"plain": {}, "files": offload}.items():
        run_ranks(2, export, where, str(tmp_path / name))
        texts.append((tmp_path / name / "model.safetensors").read_bytes())
    assert texts[0] == texts[1]


def split(world, offload):
    engine = start(world, {"offload_param": offload}, bf16=True, sizes={"layers": 8})
    train(engine, 2)
    text = engine._core.summary()
    lines = {line.role: (line.predicted_bytes, line.measured_bytes) for line in engine.memory()}
    engine.destroy()
    return text, lines


@pytest.mark.costly
def test_the_split_is_counted_and_said(tmp_path):
    total = 2 * 8 * (1100 * 1100 + 1100) / MIB
    layer = 2 * (1100 * 1100 + 1100) / MIB
    for kept in (0, 2 * 1024 * 1024, 1_000_000_000):
        options = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "max_in_cpu": kept}
        text, lines = run_ranks(1, split, options)[0]
        found = re.search(r"  parameters: .*\(([\d.]+) MiB\), .* in files of .* \(([\d.]+) MiB.*through ([\d.]+)", text)
        assert found, text
        in_memory, in_files, through = map(float, found.groups())
        assert in_memory + in_files == pytest.approx(total, rel=0.01)
        assert in_memory <= 2 * kept / MIB + 0.1
        predicted, measured = (value / MIB for value in lines["parameters"])
        assert measured == pytest.approx(in_memory + through, abs=0.2)
        assert predicted == pytest.approx(measured, rel=0.02)
        assert lines["gathered peak"][1] / MIB <= 2 * layer + 0.5  # the two largest units


def test_a_full_disk_is_named_before_training(mount_disk):
    small = mount_disk("6m")
    words = rf"cannot reserve \d+ bytes in '{small}': No space left on device.*nvme_path"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(1, run, {"offload_param": {"device": "nvme", "nvme_path": str(small)}}, False)


@pytest.mark.parametrize(
    ("stage", "offload", "more", "words"),
    [
        (3, {"device": "nvme"}, {}, 'offload_param.device "nvme" needs nvme_path'),
        (2, {"device": "nvme", "nvme_path": "/tmp"}, {}, 'offload_param.device "nvme" needs stage 3'),
        (3, {"device": "nvme", "nvme_path": "/tmp"}, {"deeptide": {"on_skipped": "rewind"}}, "on_skipped"),
        (3, {"device": "disk"}, {}, "offload_param.device"),
        (3, {"device": "nvme", "nvme_path": 7}, {}, "offload_param.nvme_path"),
        (3, {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 0}, {}, "offload_param.buffer_count"),
        (3, {"device": "nvme", "nvme_path": "/tmp", "buffer_size": 0}, {}, "offload_param.buffer_size"),
        (3, {"device": "nvme", "nvme_path": "/tmp", "max_in_cpu": -1}, {}, "offload_param.max_in_cpu"),
    ],
)
def test_bad_values_are_named(stage, offload, more, words):
    config = models.config(stage, zero={"offload_param": offload}, **more)
    with pytest.raises(deeptide.ConfigError, match=re.escape(words)):
        deeptide.initialize(model=nn.Linear(2, 2), config=config)
