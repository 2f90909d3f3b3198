# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""1-bit optimizers: Adam or LAMB while they warm up, then signs; what they send, save, refuse.

tests/zero/one_bit_test.cc compares their steps with a simulation.
"""

import statistics
from pathlib import Path

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import utils

FREEZE = 2
PARAMS = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1}


def start(world=None, type="OneBitAdam", params=None, gas=1, bf16=False, freeze=FREEZE, **more):
    chosen = {**PARAMS, **(params or {})}
    if type in ("OneBitAdam", "OneBitLamb"):
        chosen["freeze_step"] = freeze
    if type == "ZeroOneAdam":
        chosen = {"var_freeze_step": freeze, **chosen}
    model = more.pop("model", None) or models.make_model()
    config = models.config(0, gas=gas, bf16=bf16, optimizer={"type": type, "params": chosen}, **more)
    return deeptide.initialize(model=model, config=config, world=world)[0]


def train(engine, first, last, gas=1):
    rank, size = engine.world.rank, engine.world.size
    outcomes = []
    for tokens, targets in models.batches(last * gas, 4 * size)[first * gas :]:
        part = slice(4 * rank, 4 * rank + 4)
        engine.backward(engine(tokens[part], targets[part]))
        outcomes.append(engine.step())
    return outcomes[gas - 1 :: gas]


def state_of(engine):
    names = [name for name, _ in engine.module.named_parameters()]
    roles = ("master", "exp_avg", "exp_avg_sq")
    return {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in roles}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("type", "dense"), [("OneBitAdam", "Adam"), ("OneBitLamb", "Lamb")])
def test_warm_up_is_the_dense_optimizer_without_bias_correction_bit_for_bit(type, dense, bf16, gas):
    def run(world, type, params):
        engine = start(world, type, params, gas=gas, bf16=bf16, freeze=3)
        norms = [outcome.grad_norm for outcome in train(engine, 0, 3, gas)]
        return state_of(engine), norms

    one_bit = run_ranks(2, run, type, {})
    plain = run_ranks(2, run, dense, {"bias_correction": False})
    for (state, norms), (expected, expected_norms) in zip(one_bit, plain, strict=True):
        assert norms == expected_norms
        assert_same(state, expected)


@pytest.mark.both_ways
@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb"])
@pytest.mark.parametrize(("gas", "bf16"), [(1, False), (2, False), (2, True)])
def test_ranks_hold_the_same_bits_and_variances_are_frozen(gas, bf16, type):
    def run(world):
        engine = start(world, type, gas=gas, bf16=bf16)
        train(engine, 0, FREEZE, gas)
        warm = state_of(engine)
        outcomes = train(engine, FREEZE, FREEZE + 4, gas)
        assert all(outcome.applied and outcome.clipped_norm <= 1.0 + 1e-6 for outcome in outcomes)
        return warm, state_of(engine), [outcome.grad_norm for outcome in outcomes]

    (warm, state, norms), *others = run_ranks(3, run)
    for _, other, other_norms in others:
        assert_same(other, state)
        assert other_norms == norms
    for name, value in state.items():
        assert torch.equal(value, warm[name]) == name.endswith("/exp_avg_sq"), name


def test_one_rank_compresses_nothing():
    engine = start()
    train(engine, 0, FREEZE)
    names = [name for name, _ in engine.module.named_parameters()]
    variances = {name: engine._core.full_state(name, "exp_avg_sq") for name in names}
    momenta = {name: engine._core.full_state(name, "exp_avg") for name in names}
    values = {name: engine._core.full_state(name, "master") for name in names}
    plain = models.make_model()
    plain.load_state_dict(engine.module_state_dict())
    outcome = train(engine, FREEZE, FREEZE + 1)[0]
    tokens, targets = models.batches(FREEZE + 1, 4)[FREEZE]
    plain(tokens, targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(outcome.grad_norm, float(norm), rtol=1e-5, atol=0)
    lr, beta, eps, decay = PARAMS["lr"], PARAMS["betas"][0], PARAMS["eps"], PARAMS["weight_decay"]
    for name, parameter in plain.named_parameters():
        momentum = beta * momenta[name] + (1 - beta) * parameter.grad
        expected = values[name] * (1 - lr * decay) - lr * momentum / (variances[name].sqrt() + eps)
        # eps 1e-5 bounds what a few roundings of the gradient do to a weight, as in test_stages.py.
        torch.testing.assert_close(engine._core.full_state(name, "master"), expected, rtol=2e-5, atol=2e-5)


def test_signs_take_a_thirtieth_of_the_bytes_or_less():
    def run(world):
        engine = start(world, model=models.make_model(width=128))
        return [outcome.sent_bytes for outcome in train(engine, 0, FREEZE + 2)]

    *dense, first, second = run_ranks(2, run)[0]
    assert dense == [dense[0]] * FREEZE
    assert first == second
    assert 30 < dense[0] / first <= 32


def test_zero_one_adam_whose_interval_stays_is_one_bit_adam_bit_for_bit():
    def run(world, type):
        engine = start(world, type, gas=2)
        train(engine, 0, FREEZE + 3, 2)
        return state_of(engine)

    for one, other in zip(run_ranks(2, run, "ZeroOneAdam"), run_ranks(2, run, "OneBitAdam"), strict=True):
        assert_same(one, other)


def test_zero_one_adam_sends_gradients_at_intervals_that_double_also_when_resumed(tmp_path):
    params = {"var_update_scaler": 2, "var_freeze_step": 9}

    def run(world):
        engine = start(world, "ZeroOneAdam", params)
        outcomes = train(engine, 0, 5)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine = start(world, "ZeroOneAdam", params)
        engine.load_checkpoint(str(tmp_path))
        outcomes += train(engine, 5, 13)
        return [outcome.sent_bytes for outcome in outcomes]

    sent = run_ranks(2, run)[0]
    assert len(set(sent)) == 2
    assert [step for step, count in enumerate(sent, 1) if count == max(sent)] == [1, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("type", "params", "dense"),
    [
        ("OneBitAdam", {"lr": 3e-3}, "Adam"),
        ("ZeroOneAdam", {"lr": 3e-3, "var_update_scaler": 4, "var_freeze_step": 40}, "Adam"),
        ("OneBitLamb", {"lr": 1e-2}, "Lamb"),
    ],
)
def test_it_learns_as_its_dense_form_does(type, params, dense):
    """A single step's loss says little: where the last bit of the rate differs, it is up to twice as large."""

    def run(world, type, params):
        model = models.make_model()
        engine = start(world, type, params, model=model, freeze=10)
        part = slice(4 * world.rank, 4 * world.rank + 4)
        ((tokens, targets),) = models.batches(1, 4 * world.size)
        losses = []
        for _ in range(60):
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return statistics.median(losses[-20:])

    plain = sum(run_ranks(2, run, dense, {"bias_correction": False, "lr": params["lr"]}))
    one_bit = sum(run_ranks(2, run, type, params))
    start_loss = 2 * 3.6  # log(37) per rank
    assert plain < 0.5 * start_loss
    # The compressed steps are noisier; within a twentieth of the distance that the dense ones covered.
    assert one_bit - plain < 0.05 * (start_loss - plain)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb"])
def test_a_run_resumed_while_it_warms_up_is_the_run(type, tmp_path):
    def run(world, saves):
        engine = start(world, type)
        if saves:
            train(engine, 0, 1)
            engine.save_checkpoint(str(tmp_path))
        else:
            engine.load_checkpoint(str(tmp_path))
        train(engine, 1, FREEZE + 3)
        return state_of(engine)

    straight = run_ranks(2, run, True)[0]
    assert_same(run_ranks(2, run, False)[0], straight)


@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb"])
def test_a_load_forgets_the_errors_of_signs(type, tmp_path):
    def run(world, saves):
        engine = start(world, type)
        if saves:
            train(engine, 0, FREEZE + 2)
            engine.save_checkpoint(str(tmp_path))
            train(engine, FREEZE + 2, FREEZE + 4)
            straight = state_of(engine)
        engine.load_checkpoint(str(tmp_path))
        train(engine, FREEZE + 2, FREEZE + 4)
        resumed = state_of(engine)
        if saves:
            assert any(not torch.equal(value, straight[name]) for name, value in resumed.items())
        return resumed

    again = run_ranks(2, run, True)[0]
    assert_same(run_ranks(2, run, False)[0], again)


# -- what a step by signs refuses or skips ----------------------------------------------------------------------------


def test_one_bit_lamb_goes_on_bit_for_bit_after_a_load_where_there_are_no_errors(tmp_path):
    engine = start(type="OneBitLamb")  # of one rank, which compresses nothing
    train(engine, 0, FREEZE + 2)
    folder = engine.save_checkpoint(str(tmp_path))
    train(engine, FREEZE + 2, FREEZE + 5)
    resumed = start(type="OneBitLamb")
    resumed.load_checkpoint(str(tmp_path))
    train(resumed, FREEZE + 2, FREEZE + 5)
    assert_same(state_of(resumed), state_of(engine))
    assert "parameter_numbers" in (Path(folder) / "manifest.json").read_text()


@pytest.mark.parametrize("type", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_are_refused(stage, type):
    config = models.config(stage, optimizer={"type": type, "params": PARAMS})
    with pytest.raises(deeptide.ConfigError, match=rf"{type} needs stage 0.*choose another optimizer"):
        deeptide.initialize(model=models.make_model(), config=config)


def test_gradients_cannot_be_kept():
    config = models.config(0, optimizer={"type": "OneBitAdam", "params": PARAMS}, deeptide={"keep_grad": True})
    with pytest.raises(deeptide.ConfigError, match="keep_grad shows the ranks' mean gradient, which OneBitAdam"):
        deeptide.initialize(model=models.make_model(), config=config)


def test_an_overflow_on_one_rank_touches_nothing_and_is_named():
    def run(world):
        engine = start(world)
        train(engine, 0, FREEZE + 1)
        before = state_of(engine)
        tokens, targets = models.batches(1, 4)[0]
        loss = engine(tokens, targets)
        engine.backward(loss * (float("nan") if world.rank == 1 else 1.0))
        outcome = engine.step()
        assert not outcome.applied and outcome.reason == "non-finite gradient"
        assert_same(state_of(engine), before)
        assert train(engine, FREEZE + 1, FREEZE + 2)[0].applied  # and nothing is left of it
        return outcome.parameter, outcome.rank

    names = dict(models.make_model().named_parameters())
    for parameter, rank in run_ranks(2, run):
        assert parameter in names
        assert rank == 1


def test_there_is_no_mean_gradient_to_read_or_write_in_a_step_by_signs():
    engine = start()
    train(engine, 0, FREEZE)
    tokens, targets = models.batches(1, 4)[0]
    engine.backward(engine(tokens, targets))
    parameter = next(engine.module.parameters())
    assert utils.safe_get_full_grad(parameter) is None
    with pytest.raises(ValueError, match="OneBitAdam exchanges signs in this step"):
        utils.safe_set_full_grad(parameter, torch.zeros_like(parameter))
    assert engine.step().applied


def test_predicted_bytes_of_states_and_errors_are_the_measured_ones():
    def run(world):
        engine = start(world, bf16=True)
        return next(line for line in engine.memory() if line.role == "optimizer states")

    line = run_ranks(2, run)[0]
    assert line.predicted_bytes == line.measured_bytes > 0


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ({"freeze_step": -1}, "freeze_step=-1, expected a number of at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\), expected both in \[0, 1\)"),
        ({"lr": float("nan")}, "lr=nan, expected a number of at least 0"),
        ({"eps": -1.0}, "eps=-1.0, expected a number of at least 0"),
        ({"bias_correction": False}, "unknown key 'bias_correction'; OneBitAdam knows"),
    ],
)
def test_groups_are_refused_if(group, text):
    model = models.make_model()
    config = models.config(0, optimizer={"type": "OneBitAdam", "params": PARAMS})
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(
            model=model, config=config, model_parameters=[{"params": list(model.parameters()), **group}]
        )


def test_a_rank_that_has_joined_counts_as_one_whose_gradient_is_zero():
    def run(world, joins):
        engine = start(world)
        train(engine, 0, FREEZE)
        if world.rank == 1 and joins:
            engine.join()
            return state_of(engine)
        tokens, targets = models.batches(FREEZE + 1, 4)[FREEZE]
        loss = engine(tokens, targets)
        engine.backward(loss * (0.0 if world.rank == 1 else 1.0))
        assert engine.step().applied
        if joins:
            engine.join()
        return state_of(engine)

    for one, other in zip(run_ranks(2, run, True), run_ranks(2, run, False), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("type", "key", "value"),
    [
        ("OneBitAdam", "freeze_step", -1),
        ("OneBitAdam", "freeze_step", 1.5),
        ("OneBitAdam", "comm_backend_name", "udp"),
        ("OneBitAdam", "cuda_aware", 2),
        ("OneBitAdam", "eps", -1e-8),
        ("OneBitLamb", "coeff_beta", 1.5),
        ("OneBitLamb", "factor_max", 0.9),
        ("OneBitLamb", "factor_min", 1.1),
        ("OneBitLamb", "factor_threshold", -0.1),
        ("OneBitLamb", "min_coeff", 11.0),
        ("ZeroOneAdam", "var_update_scaler", 0),
        ("ZeroOneAdam", "var_freeze_step", -1),
        ("ZeroOneAdam", "freeze_step", 5),
    ],
)
def test_bad_values_are_named(type, key, value):
    config = models.config(0, optimizer={"type": type, "params": {key: value}})
    with pytest.raises(deeptide.ConfigError, match=f"optimizer.params.{key}"):
        deeptide.initialize(model=models.make_model(), config=config)


WAYS = ["not taken", "frozen", "not there"]


class Branches(torch.nn.Module):
    """An embedding of which some rows are used late and some never, and a branch that is at first as `way` says."""

    def __init__(self, way="not taken"):
        super().__init__()
        with models._seeding:
            torch.manual_seed(5)
            self.rows = torch.nn.Embedding(12, 8)
            branch = torch.nn.Linear(8, 8).requires_grad_(way != "frozen")
            self.branch = None if way == "not there" else branch
            self.head = torch.nn.Linear(8, 1)

    def forward(self, tokens, late):
        x = self.rows(tokens)
        return self.head(torch.tanh(self.branch(x)) if late else x).square().mean()


def reach_branch(engine, way):
    """Makes the branch one that is trained, wherever it was not."""
    if way == "frozen":
        engine.module.branch.requires_grad_(True)
    elif way == "not there":
        engine.module.branch = Branches().branch
    if way != "not taken":
        engine.rebuild()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_what_is_first_reached_after_signs_began_moves_by_about_the_rate(type, way):
    """It has no variance: divided by one of 0, a mean of signs would throw it far off, and then all the others.

    The others move by the rate times a mean of signs, which is at most the largest momentum of the parameter, over the
    root of a variance. Rows have momenta up to 2e-2 and roots from 4e-4 on, the head 0.2 and 8e-3: up to 50 rates.
    """
    rate = 1e-3

    def run(world):
        model = Branches(way)
        engine = start(world, type, params={"lr": rate, "eps": 1e-8, "weight_decay": 0.0}, model=model)
        for step in range(12):
            late = step >= 6
            if step == 6:
                reach_branch(engine, way)
            tokens = torch.arange(4) + 4 * late + world.rank
            before = [p.detach().clone() for p in model.parameters()]
            engine.backward(engine(tokens, late))
            assert engine.step()
            for (name, p), b in zip(model.named_parameters(), before, strict=True):
                moved = (p.detach() - b).abs()
                assert moved.le(50 * rate).all(), (step, name)
                if p.requires_grad:
                    unreached = utils.safe_get_full_optimizer_state(p, "exp_avg_sq") == 0
                    assert moved[unreached].le(2 * rate).all(), (step, name)
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.destroy()
        return state

    one, other = run_ranks(2, run)
    start_values = dict(Branches().named_parameters())
    assert one.keys() == start_values.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert not torch.equal(value, start_values[name]), name
