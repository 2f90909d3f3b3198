# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Each optimizer of the configuration's table: at every stage, in groups, from torch's objects, through checkpoints."""

import json
import re

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import _C, utils

STEPS = 3
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01},
    "RMSprop": {"lr": 1e-2, "eps": 1e-2, "momentum": 0.5, "centered": True, "weight_decay": 0.01},
    "Lamb": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1},
    "Muon": {"muon_lr": 1e-2, "adam_lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1},
}
SGD_PLAIN = {"lr": 1e-1}
AT_STAGE_0 = {"OneBitAdam", "ZeroOneAdam", "OneBitLamb"}  # test_one_bit.py


def start(world=None, stage=0, type="AdamW", params=None, bf16=False, fp16=False, **arguments):
    section = {"type": type, "params": OPTIMIZERS[type] if params is None else params}
    model = arguments.pop("model", None) or models.make_model()
    half = {"enabled": fp16, "initial_scale_power": 8}
    config = models.config(stage, bf16=bf16, optimizer=section, fp16=half)
    return deeptide.initialize(model=model, config=config, world=world, **arguments)[0]


def train(engine, first=0, last=STEPS):
    rank, size = engine.world.rank, engine.world.size
    for tokens, targets in models.batches(last, 4 * size)[first:]:
        part = slice(4 * rank, 4 * rank + 4)
        engine.backward(engine(tokens[part], targets[part]))
        assert engine.step()


def rates_of(type):
    params = OPTIMIZERS[type]
    return [params["muon_lr"], params["adam_lr"]] if type == "Muon" else [params["lr"]]


def state_of(engine):
    """Masters and states by name, whole. Collective."""
    names = [name for name, _ in engine.module.named_parameters()]
    roles = ["master", *engine.optimizer.info.state_roles()]
    state = {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in roles}
    return {name: value for name, value in state.items() if value is not None}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_the_cases_here_are_the_tables_optimizers():
    here = {_C.find_optimizer(type).name for type in OPTIMIZERS}
    assert here | AT_STAGE_0 == {info.name for info in _C.optimizers()}


@pytest.mark.both_ways
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_stages_are_bit_equal(type, bf16):
    def run(world, stage):
        engine = start(world, stage, type, bf16=bf16)
        train(engine)
        return state_of(engine)

    expected = run_ranks(2, run, 0)[0]
    roles = _C.find_optimizer(type).state_roles()
    assert {name.rsplit("/")[-1] for name in expected} == {"master", *roles}
    for name in expected:
        if name.rsplit("/")[-1] in roles:
            assert expected[name].any(), f"{name} was never written"
    for stage in (1, 2, 3):
        for state in run_ranks(2, run, stage):
            assert_same(state, expected)


@pytest.mark.parametrize("type", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_one_rank_follows_torchs_optimizer_of_this_name(type):
    model = models.make_model()
    theirs = getattr(torch.optim, type)(model.parameters(), **OPTIMIZERS[type])
    for tokens, targets in models.batches(20, 4):
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    engine = start(None, 0, type)
    train(engine, 0, 20)
    for name, parameter in model.named_parameters():
        # eps 1e-5 bounds what differently ordered sums do to a weight in 20 steps, as in test_stages.py.
        torch.testing.assert_close(engine._core.full_state(name, "master"), parameter.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("type", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_each_group_steps_by_its_own_values(type):
    def groups_of(model):
        first = [p for name, p in model.named_parameters() if name.endswith("weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        rate = OPTIMIZERS[type]["lr"]
        return [{"params": first, "lr": rate / 7}, {"params": others, "lr": rate, "weight_decay": 0.0}]

    model, ours = models.make_model(), models.make_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    theirs = getattr(torch.optim, type)(groups_of(model), **OPTIMIZERS[type])
    for tokens, targets in models.batches(STEPS, 4):
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
    engine = start(None, 0, type, model=ours, model_parameters=groups_of(ours))
    train(engine)
    for name, parameter in model.named_parameters():
        update, wanted = engine._core.full_state(name, "master") - before[name], parameter.detach() - before[name]
        assert (update - wanted).abs().max() <= 0.01 * wanted.abs().max(), name


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_a_resumed_run_is_the_run_and_other_worlds_read_the_same(type, tmp_path):
    def save(world):
        engine = start(world, 2, type)
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))
        saved = state_of(engine)
        train(engine, 2, 4)
        return saved, state_of(engine)

    saved, straight = run_ranks(2, save)[0]

    def resume(world):
        engine = start(world, 2, type)
        engine.load_checkpoint(str(tmp_path))
        train(engine, 2, 4)
        return state_of(engine)

    assert_same(run_ranks(2, resume)[0], straight)

    def read(world, stage):
        engine = start(world, stage, type)
        engine.load_checkpoint(str(tmp_path))
        return state_of(engine)

    for size, stage in ((1, 0), (3, 3)):
        assert_same(run_ranks(size, read, stage)[0], saved)


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_predicted_bytes_of_states_are_the_measured_ones(type):
    engine = start(None, 1, type, bf16=True)
    line = next(line for line in engine.memory() if line.role == "optimizer states")
    assert line.predicted_bytes == line.measured_bytes > 0


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", OPTIMIZERS)
def test_groups_have_the_tables_keys_and_keep_their_own_values(type):
    model = models.make_model()
    first, *rest = model.parameters()
    engine = start(None, 0, type, model=model, model_parameters=[{"params": [first], "lr": 0.5}, {"params": rest}])
    keys = {number.group_key for number in engine.optimizer.info.hyperparameters}
    for group in engine.optimizer.param_groups:
        assert set(group) == {"params", *keys}
    assert engine.get_lr() == [0.5, *rates_of(type)]

    def other(number):
        least = number.lowest or 0.0
        return 1.0 if number.flag else least + 0.25

    for number in engine.optimizer.info.hyperparameters:  # a change of each reaches the core before the next step
        group = engine.optimizer.param_groups[1]
        if number.element >= 0:
            values = list(group[number.group_key])
            values[number.element] = other(number)
            group[number.group_key] = tuple(values)
        else:
            group[number.group_key] = bool(other(number)) if number.flag else other(number)
    train(engine, 0, 1)
    held = engine._core.hyperparameters(1)
    for number in engine.optimizer.info.hyperparameters:
        assert held[number.name] == other(number), number.name


@pytest.mark.parametrize(
    ("type", "group", "text"),
    [
        ("Lion", {"eps": 1e-8}, "unknown key 'eps'; Lion knows .*betas"),
        ("Lion", {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\), expected both in \[0, 1\)"),
        ("Lion", {"betas": (0.9,)}, r"betas=\(0.9,\), expected 2 numbers"),
        ("Lion", {"lr": float("nan")}, "lr=nan, expected a number of at least 0"),
        ("Adagrad", {"lr_decay": -1.0}, "lr_decay=-1.0, expected a number of at least 0"),
        ("Adagrad", {"betas": (0.9, 0.9)}, "unknown key 'betas'; Adagrad knows"),
        ("SGD", {"dampening": float("nan")}, "dampening=nan, expected finite numbers"),
        ("RMSprop", {"alpha": 1.0}, r"alpha=1.0, expected \[0, 1\)"),
        ("Lamb", {"max_coeff": -1.0}, "max_coeff=-1.0, expected a number of at least 0"),
        ("Muon", {"momentum": 1.5}, r"momentum=1.5, expected \[0, 1\)"),
        ("Muon", {"ns_coefficients": (1.0, 2.0)}, "expected 3 numbers"),
        ("Muon", {"adjust_lr_fn": "original"}, "unknown key 'adjust_lr_fn'; Muon knows .*match_rms_adamw"),
    ],
)
def test_groups_are_refused_if(type, group, text):
    model = models.make_model()
    with pytest.raises(deeptide.ConfigError, match=text):
        start(None, 0, type, model=model, model_parameters=[{"params": model.parameters(), **group}])


def values_out_of_range(number):
    """Bad values of one hyper-parameter, and what the error calls the values that it takes."""
    values = [float("nan"), float("inf"), -float("inf")]
    if number.lowest is not None:
        values.append(number.lowest - 0.5)
    if number.highest is not None:
        values.append(number.highest + (0.0 if number.highest_excluded else 0.5))
    return values


@pytest.mark.parametrize("type", [info.name for info in _C.optimizers()])
def test_groups_refuse_bad_values_of_every_key_by_its_name(type):
    info = _C.find_optimizer(type)
    refused = 0
    for number in info.hyperparameters:
        if number.flag:
            continue
        for bad in values_out_of_range(number):
            value = bad
            if number.element >= 0:  # all elements of a list are bad, whatever their number
                elements = [other for other in info.hyperparameters if other.group_key == number.group_key]
                value = (bad,) * len(elements)
            model = models.make_model()
            groups = [{"params": list(model.parameters()), number.group_key: value}]
            with pytest.raises(deeptide.ConfigError, match=re.escape(f"{number.group_key}=")):
                start(None, 0, type, {}, model=model, model_parameters=groups)
            refused += 1
    assert refused >= 3 * sum(not number.flag for number in info.hyperparameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_an_overflow_on_one_rank_touches_nothing_and_is_named_on_all(type, precision):
    def run(world):
        seen = []
        for stage in (0, 1, 2, 3):
            engine = start(world, stage, type, bf16=precision == "bf16", fp16=precision == "fp16")
            train(engine, 0, 1)
            before = state_of(engine)
            tokens, targets = models.batches(1, 4)[0]
            engine.backward(engine(tokens, targets) * (float("inf") if world.rank == 1 else 1.0))
            outcome = engine.step()
            assert not outcome.applied
            assert outcome.parameter in dict(engine.module.named_parameters())
            assert_same(state_of(engine), before)
            seen.append((outcome.rank, outcome.phase, engine.skipped_steps))
            engine.destroy()
        return seen

    assert run_ranks(2, run) == [[(1, "forward", 1)] * 4] * 2


def test_torchs_adagrad_becomes_ours():
    model = models.make_model()
    theirs = torch.optim.Adagrad(model.parameters(), lr=0.5, lr_decay=0.25, weight_decay=0.125, eps=1e-6)
    engine = start(model=model, optimizer=theirs)  # over the configuration's AdamW
    assert engine.optimizer.info.name == "Adagrad"
    values = engine._core.hyperparameters(0)
    assert dict(values) == {"lr": 0.5, "lr_decay": 0.25, "eps": 1e-6, "weight_decay": 0.125}
    train(engine)
    assert utils.safe_get_full_optimizer_state(next(engine.module.parameters()), "sum").any()
    assert engine.get_mom() == [0.0]


def test_torchs_adagrad_that_has_stepped_is_refused():
    model = models.make_model()
    theirs = torch.optim.Adagrad(model.parameters())
    tokens, targets = models.batches(1, 4)[0]
    model(tokens, targets).backward()
    theirs.step()
    with pytest.raises(deeptide.ConfigError, match="already stepped"):
        start(model=model, optimizer=theirs)


def test_torchs_rmsprop_becomes_ours():
    model = models.make_model()
    theirs = torch.optim.RMSprop(model.parameters(), lr=0.5, alpha=0.75, eps=1e-6, momentum=0.25, centered=True)
    engine = start(model=model, optimizer=theirs)
    values = dict(engine._core.hyperparameters(0))
    assert values == {"lr": 0.5, "alpha": 0.75, "eps": 1e-6, "weight_decay": 0.0, "momentum": 0.25, "centered": 1.0}


def test_get_mom_is_the_optimizers_betas_or_its_momentum():
    assert start(type="Lion").get_mom() == [(0.9, 0.999)]
    assert start(type="SGD").get_mom() == [0.9]
    assert start(type="Muon").get_mom() == [0.95, (0.9, 0.95)]


def test_zero_grad_refuses_to_leave_zeros():
    engine = start()
    for zero_grad in (engine.zero_grad, engine.optimizer.zero_grad):
        with pytest.raises(deeptide.ConfigError, match="leave the argument out"):
            zero_grad(set_to_none=False)
        zero_grad(set_to_none=True)


# -- states that are kept only sometimes; earlier checkpoints ---------------------------------------------------------


def manifest_of(folder):
    with open(f"{folder}/manifest.json", encoding="utf-8") as file:
        return json.load(file)


def roles_in(folder):
    return {tensor.get("moment", tensor["role"]) for tensor in manifest_of(folder)["tensors"]}


def test_sgd_without_momentum_keeps_none_until_there_is_one(tmp_path):
    engine = start(type="SGD", params=SGD_PLAIN)
    train(engine, 0, 1)
    assert "momentum" not in roles_in(engine.save_checkpoint(str(tmp_path), tag="plain"))
    engine.optimizer.param_groups[0]["momentum"] = 0.5
    train(engine, 1, 2)
    assert "momentum" in roles_in(engine.save_checkpoint(str(tmp_path), tag="moving"))

    moving = start(type="SGD", params=SGD_PLAIN)  # the checkpoint's groups bring the momentum with them
    moving.load_checkpoint(str(tmp_path), tag="moving")
    assert moving.get_mom() == [0.5]
    assert_same(state_of(moving), state_of(engine))

    train(engine, 2, 3)
    engine.load_checkpoint(str(tmp_path), tag="plain")  # and back: what the groups saved did not keep starts anew
    assert engine.get_mom() == [0.0]
    assert not any(value.any() for name, value in state_of(engine).items() if name.endswith("/momentum"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sgd_without_a_momentum_keeps_nothing_but_masters(stage):
    """And in fp32 the parameters are the masters."""
    for bf16 in (False, True):
        kept = {}
        for momentum in (0.0, 0.9):
            engine = start(stage=stage, type="SGD", params={"lr": 1e-1, "momentum": momentum}, bf16=bf16)
            train(engine, 0, 1)
            kept[momentum] = next(m.measured_bytes for m in engine.memory() if m.role == "optimizer states")
            engine.destroy()
        assert kept[0.9] > 0
        assert kept[0.0] == (kept[0.9] // 2 if bf16 else 0), (stage, kept)


def as_saved_before_rules(folder):
    """Rewrites a checkpoint's groups as they were saved when all optimizers shared one list of hyper-parameters."""
    defaults = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decoupled_decay": False, "bias_correction": True}
    defaults |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    manifest = manifest_of(folder)
    state = json.loads(manifest["state"])
    for group in state["groups"]:
        if "decoupled_weight_decay" in group:
            group["decoupled_decay"] = group.pop("decoupled_weight_decay")
        for name, value in defaults.items():
            group.setdefault(name, value)
    manifest["state"] = json.dumps(state)
    del manifest["hash"], manifest["checksum"]  # nor was there a checksum
    with open(f"{folder}/manifest.json", "w", encoding="utf-8") as file:
        json.dump(manifest, file)
    return state["groups"]


@pytest.mark.parametrize("type", ["AdamW", "SGD"])
def test_checkpoints_from_before_rules_load(type, tmp_path):
    engine = start(type=type)
    train(engine)
    if type == "AdamW":
        engine.optimizer.param_groups[0]["decoupled_weight_decay"] = False  # not the default, so that it is seen
    assert len(as_saved_before_rules(engine.save_checkpoint(str(tmp_path)))[0]) == 10
    resumed = start(type=type, params={})
    resumed.load_checkpoint(str(tmp_path))
    assert_same(state_of(resumed), state_of(engine))
    assert resumed._core.hyperparameters(0) == engine._core.hyperparameters(0)


def test_a_momentum_of_zeros_as_sgd_saved_it_before_is_left_out(tmp_path):
    engine = start(type="SGD", params={"lr": 0.1, "momentum": 0.5})
    train(engine, 0, 1)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    folder = engine.save_checkpoint(str(tmp_path))
    as_saved_before_rules(folder)
    assert "momentum" in roles_in(folder)
    resumed = start(type="SGD", params=SGD_PLAIN)
    resumed.load_checkpoint(str(tmp_path))
    assert not any(name.endswith("/momentum") for name in state_of(resumed))
    master = {name: value for name, value in state_of(engine).items() if name.endswith("/master")}
    assert_same(state_of(resumed), master)


def test_an_optimizers_checkpoint_is_refused_by_another(tmp_path):
    engine = start(type="Lion")
    train(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    other = start(type="AdamW")
    with pytest.raises(deeptide.CheckpointError, match="exp_avg_sq"):
        other.load_checkpoint(str(tmp_path))
