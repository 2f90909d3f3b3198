# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Masters, sums of gradients and moments of 16 bits: equal bits at every stage, less memory, checkpoints that fit."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import utils
from deeptide.as_deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

STAGES = [0, 1, 2, 3]
KINDS = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "fp16_master_weights_and_grads": True}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 moments": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
    "bf16 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 sums": {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
}
WITH_FP32_MASTERS = {
    None: {"bf16": {"enabled": True}},
    "fp16 masters": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
EMBEDDING = "embed.weight"
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "eps": 1e-5},
    "RMSprop": {"lr": 1e-2, "eps": 1e-2, "momentum": 0.5, "centered": True},
}


def config_of(kind, stage=0, gas=1, type="AdamW", **extra):
    section = {"type": type, "params": OPTIMIZERS.get(type, {"lr": 1e-2})}
    config = models.config(stage, gas=gas, optimizer=section, **extra)
    return {**config, **{**KINDS, **WITH_FP32_MASTERS}[kind]}


def start(world=None, kind="bf16", stage=0, gas=1, type="AdamW", model=None, **extra):
    model = models.make_model() if model is None else model
    return deeptide.initialize(model=model, config=config_of(kind, stage, gas, type, **extra), world=world)[0]


def train(engine, first=0, last=3):
    rank, size = engine.world.rank, engine.world.size
    gas = engine.gradient_accumulation_steps()
    outcome = None
    for tokens, targets in models.batches(last * gas, 2 * size)[first * gas :]:
        engine.backward(engine(tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]))
        outcome = engine.step()
    assert outcome.applied
    return outcome


def bytes_of(engine, role):
    line = next(line for line in engine.memory() if line.role == role)
    return line.predicted_bytes, line.measured_bytes


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_bit_equal(kind, world):
    """Without accumulation all; with it in pairs, which add in another order (docs/architecture.md)."""

    def run(world, stage, gas):
        engine = start(world, kind, stage, gas)
        norm = train(engine).grad_norm
        return {**models.everything(engine), "norm": torch.tensor(norm)}

    for gas, groups in ((1, [STAGES]), (2, [[0, 1], [2, 3]])):
        for stages in groups:
            states = [state for stage in stages for state in run_ranks(world, run, stage, gas)]
            for state in states[1:]:
                models.assert_same(state, states[0])


@pytest.mark.parametrize("kind", ["fp16", "bf16", "bf16 moments"])
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_every_elementwise_optimizer_steps_in_fp32_and_rounds(type, kind):
    """A step from the same 16-bit values with fp32 masters gives masters that round to these, and so do states."""
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    rounded, wide = (
        start(None, kind, 1, type=type),
        start(None, "fp16 masters" if kind == "fp16" else None, 1, type=type),
    )
    train(rounded, 0, 1), train(wide, 0, 1)
    roles = [
        role for role in rounded.optimizer.info.state_roles() if rounded._core.full_state(EMBEDDING, role) is not None
    ]
    for name, parameter in rounded.module.named_parameters():
        master = rounded._core.full_state(name, "master")
        assert parameter.dtype == dtype and master.dtype == torch.float32
        assert torch.equal(master, parameter.detach().float())
        assert torch.equal(parameter, wide._core.full_state(name, "master").to(dtype)), name
        for role in roles:
            expected = wide._core.full_state(name, role)
            expected = expected.to(dtype).float() if kind == "bf16 moments" else expected
            assert torch.equal(rounded._core.full_state(name, role), expected), (name, role)


@pytest.mark.parametrize("kind", ["bf16", "bf16 sums"])
def test_sums_of_micro_batches_are_rounded_as_torch_rounds_grad(kind):
    model = models.make_model().bfloat16()
    engine = start(None, kind, 1, gas=4)
    for micro, (tokens, targets) in enumerate(models.batches(4, 2)):
        model(tokens, targets).backward()
        engine.backward(engine(tokens, targets))
        if micro < 3:
            engine.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(engine._core.full_state(name, "gradient"), parameter.grad.float() / 4), name


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("kind", "per_element"), [(None, 12), ("bf16", 8), ("bf16 moments", 4), ("bf16 sums", 12)])
def test_states_take_the_bytes_that_the_plan_says(stage, kind, per_element):
    def run(world, gas):
        model = models.make_model()
        planned = deeptide.plan(model, config_of(kind, stage, gas), world_size=world.size)
        engine = start(world, kind, stage, gas, model=model)
        train(engine)
        lines = {line.role: line for line in engine.memory()}
        for role, line in lines.items():
            assert planned.lines[role].memory_bytes == line.predicted_bytes, role
        states = lines["optimizer states"]
        assert states.predicted_bytes == states.measured_bytes
        return states.measured_bytes, lines["gradients"].predicted_bytes

    for gas in (1, 2):
        all_ranks = run_ranks(2, run, gas)
        usual = run_ranks(2, lambda world, n=gas: _bytes_of_fp32_masters(world, stage, n))
        for (states, gradients), (usual_states, usual_gradients) in zip(all_ranks, usual, strict=True):
            assert 12 * states == per_element * usual_states
            if kind is not None:  # two rows of bf16 that stay unsummed take what an fp32 sum does
                assert 2 * gradients == usual_gradients


def _bytes_of_fp32_masters(world, stage, gas):
    engine = start(world, None, stage, gas)
    train(engine)
    return bytes_of(engine, "optimizer states")[1], bytes_of(engine, "gradients")[0]


@pytest.mark.parametrize("kind", ["fp16", "bf16 moments"])
def test_a_resumed_run_is_the_run_and_other_worlds_read_the_same(kind, tmp_path):
    def save(world):
        engine = start(world, kind, 2)
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))
        saved = models.everything(engine)
        train(engine, 2, 4)
        return saved, models.everything(engine)

    saved, straight = run_ranks(2, save)[0]

    def resume(world, stage, last):
        engine = start(world, kind, stage)
        engine.load_checkpoint(str(tmp_path))
        if last > 2:
            train(engine, 2, last)
        return models.everything(engine)

    models.assert_same(run_ranks(2, resume, 3, 4)[0], straight)
    for size, stage in ((1, 0), (3, 3)):
        models.assert_same(run_ranks(size, resume, stage, 2)[0], saved)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, value in weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved[f"{name}/master"]), name


@pytest.mark.parametrize(("before", "after"), [("bf16", None), (None, "bf16"), ("bf16 moments", "bf16")])
def test_a_checkpoint_loads_with_masters_of_another_type(before, after, tmp_path):
    first = start(None, before, 1)
    train(first)
    first.save_checkpoint(str(tmp_path))
    second = start(None, after, 1)
    second.load_checkpoint(str(tmp_path))
    for name, value in first.module_state_dict().items():
        assert torch.equal(value, second.module_state_dict()[name]), name
    for role in ("exp_avg", "exp_avg_sq"):
        for name, _ in first.module.named_parameters():
            assert torch.equal(first._core.full_state(name, role), second._core.full_state(name, role)), name
    train(second, 3, 4)


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
def test_a_written_parameter_is_its_own_master(stage):
    def run(world):
        engine = start(world, "bf16", stage)
        weight = engine.module.h[0].up.weight
        train(engine)
        whole = utils.safe_get_full_fp32_param(weight)
        assert whole.dtype == torch.float32
        utils.safe_set_full_fp32_param(weight, torch.full_like(whole, 1.0 + 2.0**-12))
        assert (utils.safe_get_full_fp32_param(weight) == 1.0).all()  # as bf16 holds it
        train(engine, 3, 4)
        return utils.safe_get_full_fp32_param(weight)

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)
    assert not (first == 1.0).all()


def test_steps_by_less_than_half_a_unit_are_lost():
    """Small steps round away here: this is the purpose of fp32 masters."""

    def run(kind):
        engine = start(None, kind, 0, model=torch.nn.Linear(4, 4).requires_grad_(True), type="SGD")
        engine.optimizer.param_groups[0]["lr"] = 1e-6
        before = engine.module.weight.detach().clone()
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
            assert engine.step()
        moved = engine._core.full_state("weight", "master") != before.float()
        return bool(moved.any())

    assert run(None)
    assert not run("bf16")


@pytest.mark.parametrize("stage", STAGES)
def test_sums_that_overflow_fp16_skip_the_step_on_all_ranks(stage):
    """Each rank's gradient fits fp16, four micro-batches of "sum" do not."""

    def run(world):
        settings = {**config_of("fp16", stage, gas=1), "gradient_allreduce_op": "sum" if stage < 3 else "mean"}
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0, "fp16_master_weights_and_grads": True}
        model = torch.nn.Linear(1, 1, bias=False)
        engine = deeptide.initialize(model=model, config=settings, world=world)[0]
        before = engine.module_state_dict()["weight"]
        factor = 6e4 if stage < 3 else 7e4
        engine.backward(engine(torch.ones(1, 1).half()).float().sum() * factor)
        outcome = engine.step()
        assert not outcome.applied
        assert torch.equal(engine.module_state_dict()["weight"], before)
        return engine.skipped_steps

    assert run_ranks(2, run) == [1, 1]


def test_the_summary_names_the_types():
    text = start(None, "bf16 moments", 1).summary()
    assert "reduce bf16, accumulate bf16, master bf16, moments bf16" in text
    text = start(None, "fp16 sums", 1).summary()
    assert "reduce fp16, accumulate fp16, master fp32, moments fp32" in text


@pytest.mark.parametrize("type", ["Lamb", "Muon", "OneBitAdam"])
def test_optimizers_that_reach_beyond_elements_are_refused(type):
    for make in (
        lambda c: deeptide.plan(models.make_model(), c),
        lambda c: deeptide.initialize(model=models.make_model(), config=c),
    ):
        with pytest.raises(
            deeptide.ConfigError, match=f"bf16_master_weights_and_grads is for optimizers.*{type} needs fp32"
        ):
            make(config_of("bf16", 0, type=type))


def test_an_optimizer_of_the_callers_own_is_refused():
    model = models.make_model()
    config = config_of("bf16", 1)
    del config["optimizer"]
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    with pytest.raises(deeptide.ConfigError, match="NAdam needs fp32 masters"):
        deeptide.initialize(model=model, config=config, optimizer=own)


@pytest.mark.parametrize("kind", ["bf16", "bf16 moments"])
def test_moments_of_rounded_masters_go_to_files(kind, tmp_path):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine, resident = start(None, kind, 2, zero=zero), start(None, kind, 2)
    train(engine), train(resident)
    models.assert_same(models.everything(engine), models.everything(resident))
