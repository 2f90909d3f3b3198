# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Moments in bf16, rounded stochastically: equal bits at any stage and world, runs that resume, less memory."""

import copy

import models
import pytest
import torch
from conftest import run_ranks
from test_packed_states import run_wide, train

import deeptide
from deeptide import utils

STAGES = [0, 1, 2, 3]
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-5, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "Lion": {"lr": 1e-2, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "eps": 1e-5},
    "RMSprop": {"lr": 1e-2, "eps": 1e-2, "momentum": 0.5},
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def config_of(stage, type="AdamW", precision="bf16", moments="bf16", packed=False, gas=1, deeptide=None, **extra):
    own = {"moment_dtype": moments, "packed_states": packed, "seed": 5, **(deeptide or {})}
    section = {"type": type, "params": OPTIMIZERS.get(type, {"lr": 1e-2})}
    config = {**models.config(stage, gas=gas, optimizer=section, deeptide=own, **extra), **PRECISIONS[precision]}
    return copy.deepcopy(config)  # tests change it


def start(world, stage, *args, model=None, **extra):
    model = models.make_model() if model is None else model
    return deeptide.initialize(model=model, config=config_of(stage, *args, **extra), world=world)[0]


def step_alike(engine, steps):
    """Steps with gradients that do not depend on the number of ranks, set by hand."""
    for step in range(steps):
        tokens, targets = models.batches(1, 2)[0]
        engine.backward(engine(tokens, targets))
        generator = torch.Generator().manual_seed(step)
        for parameter in engine.module.parameters():
            utils.safe_set_full_grad(parameter, torch.randn(parameter.shape, generator=generator))
        assert engine.step()


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_worlds_and_stages_have_equal_bits(type, precision):
    """Random bits follow from seed, step and element: not from which rank steps it, nor whether masters are packed."""

    def run(world, stage, packed):
        engine = start(world, stage, type, precision, packed=packed, gradient_clipping=0.0)
        step_alike(engine, 3)
        return models.everything(engine)

    states = [
        run_ranks(world, run, stage, precision == "bf16" and (world + stage) % 2 == 0)[world - 1]
        for world in (1, 2, 3)
        for stage in STAGES
    ]
    for state in states[1:]:
        models.assert_same(state, states[0])


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_moments_are_bf16_and_near_those_of_fp32(type):
    def run(moments, seed):
        engine = start(None, 1, type, "fp32", moments, deeptide={"seed": seed}, gradient_clipping=0.0)
        step_alike(engine, 1)
        return models.everything(engine)

    exact, rounded, other = run("fp32", 5), run("bf16", 5), run("bf16", 6)
    differs = False
    for name, value in rounded.items():
        role = name.split("/")[-1]
        if role not in ("exp_avg", "exp_avg_sq", "momentum", "sum", "square_avg", "momentum_buffer"):
            continue
        assert torch.equal(value, value.bfloat16().float()), name
        assert not torch.equal(value, exact[name]), name
        assert torch.allclose(value, exact[name], rtol=2**-7, atol=0), name  # a neighbour
        differs = differs or not torch.equal(value, other[name])
    assert differs  # another seed


def test_a_second_moment_decays_as_slowly_as_it_should():
    """At a beta2 of 0.999 rounding to nearest would keep it; on average rounding stochastically does not."""
    model = torch.nn.Linear(256, 256, bias=False)
    engine = start(None, 0, "AdamW", "fp32", model=model, gradient_clipping=0.0)
    for step in range(200):
        engine.backward(engine(torch.ones(1, 256)).sum())
        utils.safe_set_full_grad(model.weight, torch.full((256, 256), 1.0 if step == 0 else 0.0))
        engine.step()
    second = utils.safe_get_full_optimizer_state(model.weight, "exp_avg_sq")
    wanted = 0.001 * 0.999**199
    # 65536 elements, each of 199 roundings off by at most 2^-7 of the value: ten deviations of the mean.
    assert abs(second.mean().item() / wanted - 1) < 10 * 2**-7 * 199**0.5 / 256


@pytest.mark.both_ways
@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_run_is_the_run(packed, tmp_path):
    def save(world):
        engine = start(world, 2, packed=packed)
        train(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path))
        saved = models.everything(engine)
        return saved, train(engine, 3, 5), models.everything(engine)

    saved, losses, straight = run_ranks(2, save)[0]

    def resume(world, stage, last):
        engine = start(world, stage, packed=not packed)
        engine.load_checkpoint(str(tmp_path))
        return train(engine, 3, last) if last > 3 else [], models.everything(engine)

    further, state = run_ranks(2, resume, 3, 5)[0]
    assert further == losses
    models.assert_same(state, straight)
    for size, stage in ((1, 0), (3, 3)):
        models.assert_same(run_ranks(size, resume, stage, 3)[0][1], saved)


def test_a_checkpoint_loads_into_the_other_type_and_says_what_is_rounded(tmp_path, capfd):
    exact, rounded = start(None, 1, moments="fp32"), start(None, 1, moments="bf16")
    for engine, name in ((exact, "fp32"), (rounded, "bf16")):
        train(engine)
        engine.save_checkpoint(str(tmp_path / name))
    saved_exact, saved_rounded = models.everything(exact), models.everything(rounded)
    capfd.readouterr()
    widened = start(None, 1, moments="fp32")
    widened.load_checkpoint(str(tmp_path / "bf16"))
    models.assert_same(models.everything(widened), saved_rounded)
    assert "saved in fp32" not in capfd.readouterr().err
    narrowed = start(None, 1, moments="bf16")
    narrowed.load_checkpoint(str(tmp_path / "fp32"))
    text = capfd.readouterr().err
    assert text.count("the optimizer's states, saved in fp32, are rounded to bf16, as this run keeps them") == 1
    for name, value in models.everything(narrowed).items():
        is_moment = name.endswith(("exp_avg", "exp_avg_sq"))
        assert torch.equal(value, saved_exact[name].bfloat16().float() if is_moment else saved_exact[name]), name


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("precision", "packed", "per_element"), [("bf16", False, 8), ("bf16", True, 6), ("fp32", False, 4)]
)
def test_states_take_the_bytes_that_the_plan_says(stage, precision, packed, per_element):
    def run(world):
        model = models.make_model()
        planned = deeptide.plan(model, config_of(stage, precision=precision, packed=packed), world_size=world.size)
        engine = start(world, stage, precision=precision, packed=packed, model=model)
        train(engine)
        lines = {line.role: line for line in engine.memory()}
        for role, line in lines.items():
            assert planned.lines[role].memory_bytes == line.predicted_bytes, role
        states = lines["optimizer states"]
        assert states.predicted_bytes == states.measured_bytes
        return states.measured_bytes, lines["parameters"].measured_bytes

    for states, parameters in run_ranks(2, run):
        whole = 2 if stage in (1, 2) and not models.memory()["shared_memory"] else 1
        assert states * (2 if precision == "bf16" else 4) * whole == per_element * parameters


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_moments_of_16_bits_lie_in_files_too(packed, ratio, tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "ratio": ratio}}

    def run(world, zero):
        return run_wide(world, packed, 2, zero, None, {"moment_dtype": "bf16"})

    for state, plain in zip(run_ranks(2, run, offload), run_ranks(2, run, {}), strict=True):
        models.assert_same(state, plain)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_summary_names_them():
    text = start(None, 1).summary()
    assert "master fp32, moments bf16, rounded stochastically" in text


@pytest.mark.parametrize("type", ["Lamb", "Muon", "OneBitAdam"])
def test_optimizers_that_reach_beyond_elements_are_refused(type):
    for make in (
        lambda c: deeptide.plan(models.make_model(), c),
        lambda c: deeptide.initialize(model=models.make_model(), config=c),
    ):
        with pytest.raises(deeptide.ConfigError, match=f"moment_dtype is for optimizers.*{type} needs fp32"):
            make(config_of(0, type))


def test_an_optimizer_of_the_callers_own_is_refused():
    model = models.make_model()
    config = config_of(1)
    del config["optimizer"]
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    with pytest.raises(deeptide.ConfigError, match=r"moment_dtype is for optimizers.*NAdam needs fp32"):
        deeptide.initialize(model=model, config=config, optimizer=own)


def test_centered_rmsprop_is_refused():
    config = config_of(1, "RMSprop")
    config["optimizer"]["params"]["centered"] = True
    with pytest.raises(deeptide.ConfigError, match=r'moment_dtype "bf16" does not suit RMSprop: with "centered"'):
        deeptide.initialize(model=models.make_model(), config=config)


def test_two_ways_to_round_moments_contradict_each_other():
    config = config_of(1, precision="bf16 masters")
    config["bf16"]["bf16_optimizer_states"] = True
    with pytest.raises(deeptide.ConfigError, match=r"moment_dtype: .*contradicts bf16\.bf16_optimizer_states"):
        deeptide.initialize(model=models.make_model(), config=config)
