# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Packed masters: no other number than whole ones, two bytes less, and a written parameter is its own master."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import utils

STAGES = [0, 1, 2, 3]
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "eps": 1e-5},
    "RMSprop": {"lr": 1e-2, "eps": 1e-2, "momentum": 0.5, "centered": True},
    "Lamb": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 2},
}
EMBEDDING = "embed.weight"


def config_of(packed, stage, gas=1, type="AdamW", deeptide=None, **extra):
    own = {**(deeptide or {}), "packed_states": packed}
    section = {"type": type, "params": OPTIMIZERS[type]}
    return models.config(stage, gas=gas, bf16=True, optimizer=section, deeptide=own, **extra)


def start(world, packed, stage, *args, model=None, **extra):
    model = models.make_model() if model is None else model
    return deeptide.initialize(model=model, config=config_of(packed, stage, *args, **extra), world=world)[0]


def train(engine, first=0, last=4):
    rank, size = engine.world.rank, engine.world.size
    gas = engine.gradient_accumulation_steps()
    losses = []
    for tokens, targets in models.batches(last * gas, 2 * size)[first * gas :]:
        loss = engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_packed_masters_change_no_number(type, stage, world):
    if type == "OneBitAdam" and stage > 0:
        stage = 0

    def run(own, packed, gas):
        engine = start(own, packed, stage, gas, type)
        losses = train(engine)
        return losses, engine.get_global_grad_norm(), models.everything(engine)

    gas = 2 if world == 2 else 1
    whole, packed = (run_ranks(world, run, kind, gas) for kind in (False, True))
    for (losses, norm, state), (plain, plain_norm, plain_state) in zip(packed, whole, strict=True):
        assert losses == plain
        assert norm == plain_norm
        models.assert_same(state, plain_state)
        assert not torch.equal(state[f"{EMBEDDING}/master"], state[EMBEDDING].float())  # there is something to keep


@pytest.mark.both_ways
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_run_resumes_bit_for_bit_packed_or_not(before, after, tmp_path):
    def save(world):
        engine = start(world, before, 2)
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))
        return models.everything(engine), train(engine, 2, 4), models.everything(engine)

    saved, losses, straight = run_ranks(2, save)[0]

    def resume(world, stage, last):
        engine = start(world, after, stage)
        engine.load_checkpoint(str(tmp_path))
        further = train(engine, 2, last) if last > 2 else []
        return further, models.everything(engine)

    for stage in (3, 1):
        further, state = run_ranks(2, resume, stage, 4)[0]
        assert further == losses
        models.assert_same(state, straight)
    for size, stage in ((1, 0), (3, 3)):
        models.assert_same(run_ranks(size, resume, stage, 2)[0][1], saved)


def write_in_place(engine, weight, value):
    with torch.no_grad():
        weight.copy_(value)


def write_by_load_state_dict(engine, weight, value):
    """Loads the whole state as it is, but for one weight."""
    state = {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}
    state["h.1.up.weight"] = value
    own = engine.module.load_state_dict(state, strict=False)
    assert not own.unexpected_keys


def write_gathered(engine, weight, value):
    with deeptide.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.copy_(value if engine.world.rank == 0 else -value)


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", [write_in_place, write_by_load_state_dict, write_gathered])
def test_a_written_parameter_is_its_master_to_the_last_bit(write, stage):
    def run(world):
        engine = start(world, True, stage)
        weight, other = engine.module.h[1].up.weight, engine.module.h[0].up.weight
        train(engine)
        before, value = utils.safe_get_full_fp32_param(other), torch.full(tuple(weight.shape), 0.375).bfloat16()
        write(engine, weight, value)
        master = utils.safe_get_full_fp32_param(weight)
        kept = torch.equal(utils.safe_get_full_fp32_param(other), before)
        train(engine, 4, 5)
        return master, kept, utils.safe_get_full_fp32_param(weight)

    (master, kept, after), (_, _, on_other_rank) = run_ranks(2, run)
    assert bool((master == 0.375).all())
    assert kept or write is write_by_load_state_dict  # which writes them all
    assert not bool((after == 0.375).all())
    assert torch.equal(after, on_other_rank)


@pytest.mark.apart
def test_a_write_that_moves_no_version_counter_is_followed_up_to_the_low_bits():
    """With whole masters the next step would undo it."""
    engine = start(None, True, 1)
    weight = engine.module.h[1].up.weight
    train(engine)
    weight.data.fill_(0.375)
    master = utils.safe_get_full_fp32_param(weight)
    assert bool(((master - 0.375).abs() <= 2.0**-10).all())
    assert not bool((master == 0.375).all())


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
def test_masters_are_read_and_set_with_all_their_bits(stage):
    """Also those halfway between two bf16 numbers, on either side of the one that they round to."""
    values = [1.0 + 2.0**-12, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 5 * 2.0**-8, 3.4e38, 1e-40, -0.1, 0.0]

    def run(world):
        engine = start(world, True, stage)
        weight = engine.module.h[0].up.weight
        train(engine)
        wanted = torch.tensor(values).repeat(weight.numel() // len(values) + 1)[: weight.numel()].view(weight.shape)
        utils.safe_set_full_fp32_param(weight, wanted)
        got = utils.safe_get_full_fp32_param(weight)
        mine = engine._core.local_state("h.0.up.weight", "master")
        shown = engine.module_state_dict()["h.0.up.weight"]
        return torch.equal(got, wanted), torch.equal(shown, wanted.bfloat16()), mine, wanted.flatten()

    for whole, rounded, (begin, part), wanted in run_ranks(2, run):
        assert whole and rounded
        assert torch.equal(part, wanted[begin : begin + part.numel()])


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
def test_states_take_two_bytes_less_as_the_plan_says(stage):
    def run(world, packed):
        model = models.make_model()
        planned = deeptide.plan(model, config_of(packed, stage), world_size=world.size)
        engine = start(world, packed, stage, model=model)
        train(engine)
        lines = {line.role: line for line in engine.memory()}
        for role, line in lines.items():
            assert planned.lines[role].memory_bytes == line.predicted_bytes, role
        states = lines["optimizer states"]
        assert states.predicted_bytes == states.measured_bytes
        return states.measured_bytes

    for whole, packed in zip(*(run_ranks(2, run, kind) for kind in (False, True)), strict=True):
        assert 12 * packed == 10 * whole


def run_wide(world, packed, stage, zero, placement, own=None):
    own = {**(own or {}), **({"placement": placement} if placement else {})}
    zero = {**zero, "stage3_max_live_parameters": 0}
    engine = start(world, packed, stage, model=models.make_model(kind=models.Wide), zero=zero, deeptide=own)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * world.rank + step)
        engine.backward(engine(torch.randn(2, 1100, generator=generator).bfloat16()))
        engine.step()
    lines = {line.role: line for line in engine.memory()}
    states = lines["optimizer states"]
    assert states.measured_bytes == states.predicted_bytes
    state = models.everything(engine)
    engine.destroy()
    return state


@pytest.mark.costly
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["states", "share of states", "parameters", "parameters and states", "placed"])
def test_halves_in_files_change_no_number(kind, world, tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero, placement = {}, None
    if "states" in kind:
        zero["offload_optimizer"] = {**nvme, "ratio": 0.4 if kind.startswith("share") else 1.0}
    if "parameters" in kind:
        zero["offload_param"] = nvme
    if kind == "placed":
        share = {"cpu": "40%", "nvme": "rest"}
        placement = {"optimizer_states": share, "parameters": share, "nvme_path": str(tmp_path)}
    expected = run_ranks(world, run_wide, False, 3, {}, None)
    for state, plain in zip(run_ranks(world, run_wide, True, 3, zero, placement), expected, strict=True):
        models.assert_same(state, plain)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def rewound(world, packed):
    own = {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 1}
    engine = start(world, packed, 2, deeptide=own)
    train(engine, 0, 3)
    tokens, targets = models.batches(1, 2)[0]
    engine.backward(engine(tokens, targets) * float("nan"))
    outcome = engine.step()
    after = train(engine, 3, 5)
    line = next(line for line in engine.memory() if line.role == "optimizer states")
    assert line.predicted_bytes == line.measured_bytes
    plan = deeptide.plan(models.make_model(), config_of(packed, 2, deeptide=own), world_size=world.size)
    assert plan.lines["optimizer states"].memory_bytes == line.predicted_bytes
    return outcome.rewound_to, after, models.everything(engine)


@pytest.mark.both_ways
def test_a_rewind_brings_back_all_bits():
    for (to, losses, state), (plain_to, plain, plain_state) in zip(
        run_ranks(2, rewound, True), run_ranks(2, rewound, False), strict=True
    ):
        assert to == plain_to == 2
        assert losses == plain
        models.assert_same(state, plain_state)


@pytest.mark.apart
def test_drift_in_low_halves_is_found_and_mended():
    """Only a master differs: rank 1 moves one by less than bf16 shows."""

    def run(world, on_drift):
        engine = start(world, True, 0, deeptide={"drift_interval": 1, "on_drift": on_drift})
        train(engine, 0, 2)
        master = engine._core.local_state("norm.weight", "master")[1]
        bits = (master.view(torch.int32) + world.rank).view(torch.float32)
        engine._core.set_local_state("norm.weight", "master", bits)
        train(engine, 2, 3)
        return models.everything(engine), engine._core.local_state("norm.weight", "master")[1]

    with pytest.raises(deeptide.DriftError, match=r"the first is master of 'norm\.weight'"):
        run_ranks(2, run, "stop")
    first, second = run_ranks(2, run, "sync")
    assert torch.equal(first[1], second[1])
    models.assert_same(first[0], second[0])


def test_units_that_stay_fp32_are_left_alone():
    def run(world, packed):
        model = models.make_model(kind=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
        engine = start(world, packed, 1, model=model)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            engine.backward(engine(x).float().square().mean())
            engine.step()
        assert engine.module[1].weight.dtype == torch.float32
        return models.everything(engine)

    models.assert_same(run_ranks(2, run, True)[0], run_ranks(2, run, False)[0])


def test_the_summary_names_them():
    text = start(None, True, 1).summary()
    assert "master fp32, packed beside parameters, moments fp32" in text


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"bf16": {"enabled": False}}, r"packed_states: true needs bf16\.enabled"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            r"packed_states: true contradicts bf16\.bf16_master_weights_and_grads",
        ),
    ],
)
def test_what_has_no_fp32_masters_beside_bf16_is_refused(sections, words):
    with pytest.raises(deeptide.ConfigError, match=words):
        deeptide.initialize(model=models.make_model(), config={**config_of(True, 1), **sections})


def test_an_optimizer_of_the_callers_own_is_refused():
    model = models.make_model()
    config = config_of(True, 1)
    del config["optimizer"]
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    with pytest.raises(
        deeptide.ConfigError, match=r"packed_states is for the optimizers of deeptide: torch\.optim\.NAdam, your own"
    ):
        deeptide.initialize(model=model, config=config, optimizer=own)
