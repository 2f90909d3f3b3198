# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.placement: shares in memory and in files change no number, keep to their caps, and must add up."""

import json
import re

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import utils

MIB = 1 << 20
REST = {"nvme": "rest"}


class Net(nn.Module):
    """Three blocks of 1.2 M parameters: at world 1 sums of several blocks of 4 MiB, and ends that are none."""

    def __init__(self, width=1100):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale.sum()
        return x.float().square().mean()


def start(world, stage, placement, gas=2, optimizer=None, **extra):
    zero = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 10} if stage == 3 else {}
    config = models.config(stage, gas=gas, zero=zero, **extra)
    config["deeptide"] = {**config.get("deeptide", {}), "placement": placement}
    if optimizer:
        config["optimizer"] = optimizer
    return deeptide.initialize(model=models.make_model(kind=Net), config=config, world=world)[0]


def train(engine, steps):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * engine.world.rank + step)
        loss = engine(torch.randn(2, 1100, generator=generator).to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(world, stage, placement, gas, extra):
    engine = start(world, stage, placement, gas, **extra)
    losses, norm = train(engine, 8), engine.get_global_grad_norm()
    state = models.everything(engine)
    engine.destroy()
    return losses, norm, state


def placements(stage, folder):
    few = {"cpu": "30%", "nvme": "rest"}
    kinds = {"gradients": few, "optimizer_states": {"device": "4MiB", "cpu": "20%", "nvme": "rest"}}
    if stage == 3:
        kinds["parameters"] = {"cpu": "2 MB", "nvme": "rest"}
    return [
        {"gradients": REST, "nvme_path": str(folder)},
        {**kinds, "nvme_path": [str(folder / "a"), str(folder / "b")]},
    ]


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_placement_changes_no_number(world, stage, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPTIDE_TEST_APART", "1" if stage != 2 else "0")
    bf16, gas = world != 2, 1 if world == 3 else 2
    extra = {"bf16": bf16, "gradient_clipping": 0.01}
    expected = run_ranks(world, run, stage, {}, gas, extra)
    for placement in placements(stage, tmp_path):
        for (losses, norm, state), (plain, plain_norm, plain_state) in zip(
            run_ranks(world, run, stage, placement, gas, extra), expected, strict=True
        ):
            assert losses == plain, placement
            assert norm == plain_norm, placement
            for name, value in plain_state.items():
                assert torch.equal(state[name], value), (placement, name)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def rounded(world, placement):
    extra = {"bf16": True, "data_types": {"grad_accum_dtype": "bf16"}}
    engine = start(world, 2, placement, **extra)
    losses = train(engine, 6)
    engine.destroy()
    return losses


def test_sums_of_16_bits_lie_in_files_too(tmp_path):
    placement = {"gradients": REST, "nvme_path": str(tmp_path)}
    assert run_ranks(2, rounded, placement) == run_ranks(2, rounded, {})


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "more"), [("Lamb", {}), ("Muon", {"ns_steps": 1})])
def test_optimizers_that_reach_beyond_elements_read_sums_from_files(kind, more, tmp_path):
    def losses(world, placement):
        engine = start(world, 2, placement, optimizer={"type": kind, "params": {"lr": 1e-3, **more}})
        found = train(engine, 6)
        engine.destroy()
        return found

    assert run_ranks(2, losses, {"gradients": REST, "nvme_path": str(tmp_path)}) == run_ranks(2, losses, {})


def overflow(world, placement):
    engine = start(world, 2, placement, gas=1)
    weight = engine.module.layers[1].weight
    before = weight.detach().clone()
    x = torch.randn(2, 1100)
    loss = engine(x)
    engine.backward(loss * (float("nan") if world.rank == 1 else 1.0))
    outcome = engine.step()
    untouched = torch.equal(weight, before)
    train(engine, 2)
    found = (engine.skipped_steps, str(outcome), untouched, bool(torch.isfinite(weight).all()))
    engine.destroy()
    return found


def test_a_step_that_is_skipped_leaves_nothing_in_files(tmp_path):
    plain, placed = (run_ranks(2, overflow, p) for p in ({}, {"gradients": REST, "nvme_path": str(tmp_path)}))
    assert [found[0] for found in placed] == [1, 1]
    assert placed == plain
    assert all(untouched and finite for _, _, untouched, finite in placed)


def by_parameter(world, placement):
    engine = start(world, 2, placement, gas=1)
    loss = engine(torch.ones(2, 1100))
    engine.backward(loss)
    weight = engine.module.layers[1].weight
    gradient = utils.safe_get_full_grad(weight)
    utils.safe_set_full_grad(weight, torch.full_like(gradient, 2e-3))
    written = utils.safe_get_full_grad(weight)
    engine.step()
    state = engine.module_state_dict()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return gradient, written, norm, state["layers.1.weight"]


def test_gradients_in_files_are_read_and_written_by_parameter(tmp_path):
    placement = {"gradients": {"cpu": "50%", "nvme": "rest"}, "nvme_path": str(tmp_path)}
    for placed, plain in zip(run_ranks(2, by_parameter, placement), run_ranks(2, by_parameter, {}), strict=True):
        assert bool((placed[1] == 2e-3).all())
        assert placed[2] == plain[2]
        for value, expected in zip((placed[0], placed[3]), (plain[0], plain[3]), strict=True):
            assert torch.equal(value, expected)


def measured(world, stage, placement):
    engine = start(world, stage, placement, gas=2, bf16=True)
    train(engine, 4)
    lines = {line.role: (line.predicted_bytes, line.measured_bytes) for line in engine.memory()}
    text = engine._core.summary()
    engine.destroy()
    return lines, text


@pytest.mark.parametrize("world", [1, 2])
def test_the_plan_says_what_lies_where_and_caps_hold(world, tmp_path):
    cap = 6 * MIB
    placement = {
        "gradients": {"cpu": "6MiB", "nvme": "rest"},
        "optimizer_states": {"cpu": "6MiB", "nvme": "rest"},
        "parameters": {"cpu": "2MiB", "nvme": "rest"},
        "nvme_path": str(tmp_path),
    }
    (lines, text), *_ = run_ranks(world, measured, 3, placement)
    config = models.config(3, gas=2, bf16=True, zero={"stage3_max_live_parameters": 0})
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 10
    config["deeptide"] = {**config.get("deeptide", {}), "placement": placement}
    plan = deeptide.plan(models.make_model(kind=Net), config, world)
    for role, kind, staging in (
        ("gradients", "gradients", 6 * 4 * MIB),
        ("optimizer states", "optimizer states", 3 * 4 * 4 * MIB),
    ):
        predicted, peak = lines[role]
        assert plan.lines[role].memory_bytes == predicted
        assert peak == pytest.approx(predicted, rel=0.02)
        assert predicted - staging <= cap
        found = re.search(rf"{kind}: ([\d.]+) % in memory .* in files of .* \(([\d.]+) MiB", text)
        assert found, text
        assert float(found[2]) == pytest.approx(plan.lines[role].file_bytes / MIB, abs=0.1)
    total = 3 * (1100 * 1100 + 1100) / world
    for role, bytes_each in (("gradients", 4), ("optimizer states", 12)):
        files = plan.lines[role].file_bytes
        assert total * bytes_each - cap <= files <= total * bytes_each - cap + 5 * MIB, role


@pytest.mark.parametrize(
    ("stage", "placement", "words"),
    [
        (2, {"gradients": {"cpu": "8 parrots"}}, r'gradients\.cpu: expected a size such as "8GiB".*got "8 parrots"'),
        (2, {"gradients": {"cpu": "140%"}}, r"gradients\.cpu: expected a size"),
        (2, {"gradients": {"cpu": "0x10GiB"}}, r"gradients\.cpu: expected a size"),
        (2, {"gradients": {"cpu": "1.5.1GiB"}}, r"gradients\.cpu: expected a size"),
        (2, {"gradients": {"cpu": "rest", "nvme": "rest"}}, r'placement\.gradients: more than one tier .*"rest"'),
        (2, {"gradients": {"cpu": "70%", "nvme": "70%"}}, "take more than 100 %"),
        (2, {"gradients": {"cpu": "8GiB"}}, 'do not say where all of it lies; give one of them "rest"'),
        (2, {"gradients": REST, "nvme_path": None}, r"files need deeptide\.placement\.nvme_path"),
        (2, {"gradient": REST}, r"unknown key; did you mean 'gradients'\?"),
        (0, {"gradients": REST}, "gradients go to files from stage 1 on.*the stage is 0"),
        (2, {"parameters": REST}, "parameters go to files at stage 3.*the stage is 2"),
    ],
)
def test_what_does_not_add_up_is_refused_by_name(stage, placement, words, tmp_path):
    with pytest.raises(deeptide.ConfigError, match=words):
        run_ranks(1, run, stage, {"nvme_path": str(tmp_path), **placement}, 1, {})


@pytest.mark.parametrize(
    ("kind", "section"), [("optimizer_states", "offload_optimizer"), ("parameters", "offload_param")]
)
@pytest.mark.parametrize("tiers", [{"cpu": "100%"}, {"device": "4GiB", "cpu": "rest"}])
def test_all_in_memory_contradicts_an_offload_to_files(kind, section, tiers, tmp_path):
    config = models.config(3, zero={section: {"device": "nvme", "nvme_path": str(tmp_path)}})
    config["deeptide"] = {"placement": {kind: tiers}}
    words = rf'{kind}: contradicts zero_optimization\.{section}\.device "nvme"; keep one of them'
    with pytest.raises(deeptide.ConfigError, match=words):
        deeptide.Config.from_text(json.dumps(config))
    config["zero_optimization"][section]["device"] = "cpu"
    deeptide.Config.from_text(json.dumps(config))


def test_two_places_for_one_kind_contradict(tmp_path):
    path = str(tmp_path)
    config = models.config(2, zero={"offload_optimizer": {"device": "nvme", "nvme_path": path}})
    config["deeptide"] = {"placement": {"optimizer_states": REST, "nvme_path": path}}
    with pytest.raises(
        deeptide.ConfigError, match=r"optimizer_states: contradicts zero_optimization\.offload_optimizer"
    ):
        deeptide.Config.from_text(json.dumps(config))
    config = models.config(2)
    config["deeptide"] = {"keep_grad": True, "placement": {"gradients": REST, "nvme_path": path}}
    with pytest.raises(deeptide.ConfigError, match=r"gradients: contradicts deeptide\.keep_grad"):
        deeptide.Config.from_text(json.dumps(config))


def own_optimizer(world, placement):
    config = models.config(2)
    del config["optimizer"]
    config["deeptide"] = {"placement": placement}
    model = models.make_model(kind=Net)
    deeptide.initialize(model=model, config=config, optimizer=torch.optim.NAdam(model.parameters()), world=world)


def test_an_optimizer_of_the_callers_keeps_its_gradients_in_memory(tmp_path):
    with pytest.raises(deeptide.ConfigError, match=r"placement\.gradients in files is for the optimizers of deeptide"):
        run_ranks(1, own_optimizer, {"gradients": REST, "nvme_path": str(tmp_path)})


def test_a_full_disk_is_named_before_training(mount_disk):
    small = mount_disk("4m")
    with pytest.raises(RuntimeError, match=rf"cannot reserve \d+ bytes in '{small}': No space left on device"):
        run_ranks(1, run, 2, {"gradients": REST, "nvme_path": str(small)}, 1, {})


def test_all_in_memory_is_the_default(tmp_path):
    everywhere = {"gradients": {"cpu": "100%"}, "optimizer_states": {"device": "60%", "cpu": "rest"}}
    assert run_ranks(1, run, 0, everywhere, 1, {})[0][0] == run_ranks(1, run, 0, {}, 1, {})[0][0]
    assert list(tmp_path.iterdir()) == []
