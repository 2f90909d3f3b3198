# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the caller's own: stepped over shards, equal to plain torch, saved, or refused for a reason."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import utils

OWN = {
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2, "eps": 1e-5}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-1, "t0": 1, "lambd": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-4}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-5, "amsgrad": True}),
    "maximize": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "maximize": True}),
    "accumulator": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5}),
}
if torch.optim.Adagrad([torch.zeros(1)]).state:  # older torch: refused, as Prepared is
    del OWN["accumulator"]
PER_ELEMENT = {
    "NAdam": {"exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "ASGD": {"ax"},
    "Rprop": {"prev", "step_size"},
    "Adadelta": {"square_avg", "acc_delta"},
    "amsgrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "maximize": {"momentum_buffer"},
    "accumulator": {"sum"},
}


def start(world, stage, make, groups=None, bf16=False, **extra):
    model = models.make_model()
    config = models.config(stage, bf16=bf16, **{"gradient_clipping": 0.0, **extra})
    optimizer = make(groups(model) if groups else model.parameters())
    return deeptide.initialize(model=model, optimizer=optimizer, config=config, world=world)[0]


def own(name):
    kind, options = OWN[name]
    return lambda parameters: kind(parameters, **options)


def train(engine, first=0, last=3):
    rank, size = engine.world.rank, engine.world.size
    for tokens, targets in models.batches(last, 4 * size)[first:]:
        part = slice(4 * rank, 4 * rank + 4)
        engine.backward(engine(tokens[part], targets[part]))
        assert engine.step()


def state_of(engine, roles):
    """Masters and states by name, whole. Collective."""
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in ["master", *roles]}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def plain(make, count, batch, groups=None):
    """A model after `count` steps of plain torch."""
    model = models.make_model()
    optimizer = make(groups(model) if groups else model.parameters())
    for tokens, targets in models.batches(count, batch):
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("name", OWN)
def test_one_rank_computes_what_plain_torch_does_bit_for_bit(name):
    model, optimizer = plain(own(name), 10, 4)
    engine = start(None, 3, own(name))
    train(engine, 0, 10)
    for key, parameter in model.named_parameters():
        assert torch.equal(engine._core.full_state(key, "master"), parameter.detach()), key
        for role in PER_ELEMENT[name]:
            assert torch.equal(engine._core.full_state(key, role), optimizer.state[parameter][role]), (key, role)


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", OWN)
def test_stages_are_bit_equal(name, size):
    def run(world, stage):
        engine = start(world, stage, own(name))
        train(engine)
        return state_of(engine, PER_ELEMENT[name])

    expected = run_ranks(size, run, 0)[0]
    assert all(value is not None for value in expected.values())
    for stage in (1, 2, 3):
        for state in run_ranks(size, run, stage):
            assert_same(state, expected)
    if name == "Rprop":
        return  # it steps by the sign of a gradient: near zero, that of a sum depends on the sum's order
    model, _ = plain(own(name), 3, 4 * size)
    for key, parameter in model.named_parameters():
        # eps bounds what differently ordered sums do to a weight in three steps
        torch.testing.assert_close(expected[f"{key}/master"], parameter.detach(), rtol=1e-4, atol=2e-4)


def test_bf16_stages_are_bit_equal_and_follow_fp32():
    def run(world, stage, bf16):
        engine = start(world, stage, own("NAdam"), bf16=bf16)
        train(engine)
        weight = engine.module.norm.weight
        with torch.no_grad():
            copy = weight.float().clone()
        return state_of(engine, PER_ELEMENT["NAdam"]), copy

    states = [run_ranks(2, run, stage, True)[0] for stage in range(4)]
    for state, _ in states[1:]:
        assert_same(state, states[0][0])
    assert torch.equal(states[3][1], states[0][0]["norm.weight/master"].bfloat16().float())
    exact = run_ranks(2, run, 0, False)[0][0]
    assert (exact["norm.weight/master"] - states[0][0]["norm.weight/master"]).abs().max() < 0.02


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_a_resumed_run_is_the_run_and_other_worlds_read_the_same(name, tmp_path):
    def save(world):
        engine = start(world, 2, own(name))
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))
        saved = state_of(engine, PER_ELEMENT[name])
        train(engine, 2, 4)
        return saved, state_of(engine, PER_ELEMENT[name])

    saved, straight = run_ranks(2, save)[0]

    def resume(world, stage):
        engine = start(world, stage, own(name))
        engine.load_checkpoint(str(tmp_path))
        train(engine, 2, 4)
        return state_of(engine, PER_ELEMENT[name])

    assert_same(run_ranks(2, resume, 3)[0], straight)

    def read(world, stage):
        engine = start(world, stage, own(name))
        if world.size == 1:
            train(engine, 0, 1)  # what the optimizer holds is replaced
        engine.load_checkpoint(str(tmp_path))
        state = state_of(engine, PER_ELEMENT[name])
        train(engine, 2, 3)
        return state

    for size, stage in ((1, 0), (3, 3)):
        assert_same(run_ranks(size, read, stage)[0], saved)


def test_a_world_of_one_resumes_what_three_ranks_saved_bit_for_bit(tmp_path):
    def save(world):
        engine = start(world, 1, own("NAdam"))
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))

    run_ranks(3, save)
    engine = start(None, 0, own("NAdam"))
    engine.load_checkpoint(str(tmp_path))
    model = models.make_model()
    optimizer = own("NAdam")(model.parameters())
    for key, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(engine._core.full_state(key, "master"))
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            "mu_product": torch.tensor(0.9 * (1 - 0.5 * 0.96**0.004) * 0.9 * (1 - 0.5 * 0.96**0.008)),
            **{role: engine._core.full_state(key, role) for role in PER_ELEMENT["NAdam"]},
        }
    tokens, targets = models.batches(1, 4)[0]
    model(tokens, targets).backward()
    optimizer.step()
    train(engine, 0, 1)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(engine._core.full_state(key, "master"), parameter.detach(), rtol=1e-6, atol=1e-7)


def test_another_optimizers_checkpoint_is_refused(tmp_path):
    start(None, 0, own("NAdam")).save_checkpoint(str(tmp_path))
    with pytest.raises(
        deeptide.CheckpointError, match=r"states of torch\.optim\.NAdam, this engine has torch\.optim\.RAdam"
    ):
        start(None, 0, own("RAdam")).load_checkpoint(str(tmp_path))
    start(None, 0, own("RAdam")).load_checkpoint(str(tmp_path), load_optimizer_states=False)


class Keeps(torch.optim.SGD):
    """Keeps an int, a None and, on demand, what no checkpoint can hold."""

    more = False
    seen = None

    def step(self, closure=None):
        if self.seen is not None:
            self.seen.append(dict(next(iter(self.state.values()))))
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    self.state[p]["nothing"] = None
                    if self.more:
                        self.state[p]["list"] = [1]


def test_numbers_and_none_in_the_state_come_back_as_they_were(tmp_path):
    def save(world):
        engine = start(world, 1, lambda p: Keeps(p, lr=0.1, momentum=0.5))
        train(engine, 0, 2)
        engine.save_checkpoint(str(tmp_path))

    run_ranks(2, save)
    run_ranks(3, lambda world: start(world, 2, lambda p: Keeps(p, lr=0.1)).load_checkpoint(str(tmp_path)))
    seen = []
    engine = start(None, 0, lambda p: seen.append(Keeps(p, lr=0.1, momentum=0.5)) or seen[0])
    engine.load_checkpoint(str(tmp_path))
    seen[0].seen = seen
    train(engine, 0, 1)
    assert (seen[1]["count"], type(seen[1]["count"]), seen[1]["nothing"]) == (2, int, None)


def test_a_state_that_no_checkpoint_holds_is_named(tmp_path):
    engine = start(None, 0, lambda p: Keeps(p, lr=0.1))
    Keeps.more = True
    try:
        train(engine, 0, 1)
    finally:
        Keeps.more = False
    with pytest.raises(deeptide.CheckpointError, match="its state 'list' is a list, which no checkpoint can hold"):
        engine.save_checkpoint(str(tmp_path))


# -- groups and schedules ---------------------------------------------------------------------------------------------


def two_groups(model):
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.05}, {"params": rest, "weight_decay": 0.2}]


def test_groups_are_live_and_a_schedule_of_the_callers_moves_them():
    model = models.make_model()
    theirs = own("NAdam")(two_groups(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)
    for tokens, targets in models.batches(4, 4):
        model(tokens, targets).backward()
        theirs.step()
        theirs.zero_grad()
        theirs.param_groups[0]["momentum_decay"] *= 2
        schedule.step()

    other = models.make_model()
    mine = own("NAdam")(two_groups(other))
    engine = deeptide.initialize(
        model=other,
        optimizer=mine,
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(mine, 0.5),
        config=models.config(2, gradient_clipping=0.0),
    )[0]
    assert engine.optimizer.param_groups is mine.param_groups
    for tokens, targets in models.batches(4, 4):
        engine.backward(engine(tokens, targets))
        engine.step()
        mine.param_groups[0]["momentum_decay"] *= 2
    assert engine.get_lr() == [group["lr"] for group in theirs.param_groups] == [0.05 / 16, 1e-2 / 16]
    assert [id(p) for group in mine.param_groups for p in group["params"]] == [id(p) for p in other.parameters()]
    for key, parameter in model.named_parameters():
        assert torch.equal(engine._core.full_state(key, "master"), parameter.detach()), key


def test_the_configurations_schedule_and_the_leading_ranks_rate_reach_it():
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}

    def run(world):
        seen = []

        class Watched(torch.optim.NAdam):
            def step(self, closure=None):
                seen.append(self.param_groups[0]["lr"])
                super().step()

        engine = start(world, 2, Watched, scheduler=schedule)
        seen.clear()  # what a trial saw
        train(engine)
        engine.optimizer.param_groups[0]["lr"] = 0.5 + world.rank
        train(engine, 0, 1)
        return seen

    for rates in run_ranks(2, run):
        assert rates == pytest.approx([0.0, 0.0, 0.0025, 0.5])


def test_integers_in_groups_stay_integers():
    seen = []

    class Counts(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                group["every"] = 2

        def step(self, closure=None):
            seen.extend(range(group["every"]) for group in self.param_groups)  # a float would be an error
            super().step()

    train(start(None, 0, Counts), 0, 2)
    assert seen[-1] == range(2)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_on_one_rank_touches_nothing_and_is_named(stage):
    def run(world):
        engine = start(world, stage, own("NAdam"))
        train(engine, 0, 1)
        before = state_of(engine, PER_ELEMENT["NAdam"])
        tokens, targets = models.batches(1, 4)[0]
        loss = engine(tokens, targets)
        engine.backward(loss * float("inf") if world.rank == 1 else loss)
        outcome = engine.step()
        assert_same(state_of(engine, PER_ELEMENT["NAdam"]), before)
        return outcome.applied, outcome.rank, outcome.parameter != "", engine.skipped_steps

    assert run_ranks(2, run) == [(False, 1, True, 1)] * 2


def test_a_parameter_without_a_gradient_stays_as_it_is():
    engine = start(None, 0, own("NAdam"))
    tokens, targets = models.batches(1, 4)[0]
    engine.backward(engine(tokens, targets) * 0 + engine.module.norm(torch.ones(20)).sum())
    assert engine.step()
    train(engine, 0, 1)


def test_states_are_read_and_written_by_parameter():
    def run(world):
        engine = start(world, 3, own("NAdam"))
        weight = next(engine.module.parameters())
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        train(engine, 0, 1)
        new = torch.full(weight.shape, 0.25)
        utils.safe_set_full_optimizer_state(weight, new, "exp_avg")
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), new)
        with pytest.raises(ValueError, match="has no state 'sum': expected one of gradient, master, exp_avg"):
            utils.safe_set_full_optimizer_state(weight, new, "sum")
        return utils.safe_get_local_optimizer_state(weight, "exp_avg")

    assert sum(part.numel() for part in run_ranks(2, run)) == 37 * 20


# -- what cannot be ---------------------------------------------------------------------------------------------------


class ByNorm(torch.optim.SGD):
    """Divides each step by the norm of all gradients."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class DecaysMatrices(torch.optim.SGD):
    """Decays what has more than one dimension, by little."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    p.data.mul_(1 - group["lr"] * group.get("decay", 1e-2))
        super().step()


def first_without_decay(parameters):
    first, *others = parameters
    return [{"params": [first], "decay": 0.0}, {"params": others}]


class Deaf(torch.optim.SGD):
    """Remembers the parameters it was made with."""

    def __init__(self, params):
        self.mine = list(params)
        super().__init__(self.mine, lr=0.1)

    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)


class Prepared(torch.optim.SGD):
    """Makes its states as it is made, for the parameters that it then has."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros_like(p)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.state[p]["sum"].add_(p.grad))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.LBFGS, "torch.optim.LBFGS: its step.. needs a closure"),
        (torch.optim.SparseAdam, "torch.optim.SparseAdam cannot step dense fp32 parameters: RuntimeError: SparseAdam"),
        (Deaf, "Deaf does not move the parameters in its param_groups"),
        (Prepared, "Prepared cannot step dense fp32 parameters: KeyError: 'sum'"),
        (lambda p: torch.optim.NAdam(p, lr=float("inf")), "NAdam: lr is inf in group 0, expected a finite number"),
    ],
)
def test_it_is_refused_at_every_stage_if(make, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        start(None, 0, make)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=0.01), "torch.optim.Adafactor cannot step shards of parameters: its st"),
        # At rates of fine-tuning, where values hardly move, and at none, where a warm-up begins.
        (lambda p: torch.optim.Adafactor(p, lr=1e-5), "Adafactor cannot step shards of parameters: its step of one"),
        (lambda p: torch.optim.Adafactor(p, lr=0.0), "Adafactor cannot step shards of parameters: its step of one"),
        (lambda p: DecaysMatrices(p, lr=1e-5), "DecaysMatrices cannot step shards of parameters: its step of one"),
        (lambda p: DecaysMatrices(first_without_decay(p), lr=1e-5), "DecaysMatrices cannot step shards of parameters"),
        (lambda p: ByNorm(p, lr=0.1), "ByNorm cannot step shards of parameters: its step of one element depends on"),
    ],
)
def test_one_that_looks_beyond_elements_needs_whole_parameters(make, text):
    def sharded(world):
        with pytest.raises(ValueError, match=text):
            start(world, 2, make)

    run_ranks(2, sharded)

    def whole(world):
        engine = start(world, 0, make)
        train(engine)
        return state_of(engine, [])

    states = run_ranks(2, whole)
    assert_same(states[0], states[1])
    model, _ = plain(make, 3, 8)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(states[0][f"{key}/master"], parameter.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adadelta"])
def test_a_warm_up_may_begin_at_no_rate(name):
    kind, options = OWN[name]
    engine = start(None, 2, lambda p: kind(p, **{**options, "lr": 0.0}))
    before = engine.module.state_dict()["norm.weight"].clone()
    train(engine, last=1)
    assert torch.equal(engine.module.norm.weight, before)
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    train(engine, first=1)
    assert not torch.equal(engine.module.norm.weight, before)
    engine.destroy()


def test_zero_allow_untested_optimizer_lets_it_step_shards_and_says_so(caplog):
    def run(world):
        engine = start(world, 2, lambda p: ByNorm(p, lr=0.1), zero_allow_untested_optimizer=True)
        train(engine)

    run_ranks(2, run)
    assert 'ByNorm steps parts of parameters as "zero_allow_untested_optimizer" asks' in caplog.text


def test_offloaded_states_are_refused(tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ValueError, match="your own optimizer, which cannot step what lies in files"):
        start(None, 2, own("NAdam"), bf16=True, zero=offload)
