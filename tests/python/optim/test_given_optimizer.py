# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer that a program gave to initialize and goes on using: it answers for the engine, or refuses."""

import models
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import deeptide
from deeptide import utils

KINDS = {
    "table": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "own": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


class Averaging(torch.optim.SGD):
    """Keeps a mean of the weights in its state and exchanges the two, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                mean.lerp_(p.detach(), 0.5)

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "mean" in self.state[p]:
                    p.data.copy_(self.state[p]["mean"])


def start(make, parameters=None, stage=2):
    model = models.make_model()
    given = make(list(model.parameters()) if parameters is None else parameters(model))
    config = models.config(stage, gradient_clipping=0.0)
    del config["optimizer"]
    engine, optimizer, _, _ = deeptide.initialize(model=model, optimizer=given, config=config)
    return engine, given, optimizer


def train(engine, first=0, last=1, step=None):
    for tokens, targets in models.batches(last, 4)[first:]:
        engine.backward(engine(tokens, targets))
        (step or engine.step)()


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_its_state_is_the_engines_or_an_error(make):
    engine, given, returned = start(make)
    train(engine)
    for optimizer in (given, returned):
        with pytest.raises(RuntimeError, match="save_checkpoint"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match="load_checkpoint"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(RuntimeError, match="safe_get_full_optimizer_state"):
            optimizer.state[engine.module.norm.weight]
        with pytest.raises(RuntimeError, match="lies in the engine"):
            _ = engine.module.norm.weight in optimizer.state
    engine.destroy()


def test_a_method_that_needs_its_state_outside_of_a_step_is_an_error():
    engine, given, _ = start(lambda p: Averaging(p, lr=0.1))
    train(engine)
    with pytest.raises(RuntimeError, match="A method of the optimizer that needs its state outside of step"):
        given.eval()
    train(engine, 1, 3)
    assert utils.safe_get_full_optimizer_state(engine.module.norm.weight, "mean") is not None
    engine.destroy()


def test_its_step_and_zero_grad_are_the_engines(make):
    engine, given, _ = start(make)
    before = engine.module.norm.weight.detach().clone()
    train(engine, step=given.step)
    assert engine.global_steps == 1
    assert not torch.equal(engine.module.norm.weight, before)
    engine.backward(engine(*models.batches(1, 4)[0]))
    given.zero_grad()
    assert utils.safe_get_full_grad(engine.module.norm.weight) is None
    engine.destroy()


def test_a_group_added_to_it_is_trained():
    def some(model):
        return [p for name, p in model.named_parameters() if not name.startswith("norm")]

    engine, given, returned = start(KINDS["table"], some)
    before = engine.module.norm.weight.detach().clone()
    train(engine)
    assert torch.equal(engine.module.norm.weight, before)
    given.add_param_group({"params": list(engine.module.norm.parameters())})
    assert given.param_groups is returned.param_groups
    train(engine, 1, 2)
    assert not torch.equal(engine.module.norm.weight, before)
    engine.destroy()


def test_a_group_added_to_an_optimizer_of_the_programs_own_is_refused():
    engine, given, _ = start(KINDS["own"], lambda model: list(model.norm.parameters()))
    others = [p for name, p in engine.module.named_parameters() if not name.startswith("norm")]
    with pytest.raises(deeptide.ConfigError, match="add_param_group: an optimizer of the program's own"):
        given.add_param_group({"params": others})
    engine.destroy()


def test_hooks_run_around_each_step_that_is_taken(make):
    engine, given, returned = start(make)
    calls = []
    for name, optimizer in (("given", given), ("returned", returned)):
        optimizer.register_step_pre_hook(lambda o, args, kwargs, name=name: calls.append(("pre", name)))
        optimizer.register_step_post_hook(lambda o, args, kwargs, name=name: calls.append(("post", name)))

    def clamp(optimizer, args, kwargs):
        with torch.no_grad():
            engine.module.norm.weight.clamp_(-0.5, 0.5)

    given.register_step_post_hook(clamp)
    train(engine)
    expected = [("pre", "returned"), ("pre", "given"), ("post", "returned"), ("post", "given")]
    assert calls == expected
    assert engine.module.norm.weight.abs().max() == 0.5
    train(engine, 1, 2, step=returned.step)
    train(engine, 2, 3, step=given.step)
    assert calls == 3 * expected
    engine.destroy()


def test_hooks_of_every_optimizer_run_once_per_step(make):
    calls = []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: calls.append("pre")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: calls.append("post")),
    ]
    try:
        engine, *_ = start(make)
        assert calls == []  # by a trial of the optimizer
        train(engine, 0, 2)
        assert calls == 2 * ["pre", "post"]
        engine.destroy()
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR", "SWALR"])
def test_a_schedule_made_before_initialize_moves_its_rates(make, schedule):
    model = models.make_model()
    given = make(model.parameters())
    made = {
        "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(given, max_lr=0.1, total_steps=10),
        "CyclicLR": lambda: torch.optim.lr_scheduler.CyclicLR(given, 1e-3, 1e-1, 4, cycle_momentum=False),
        "SWALR": lambda: torch.optim.swa_utils.SWALR(given, swa_lr=0.05, anneal_epochs=4),
    }[schedule]()
    config = models.config(2)
    del config["optimizer"]
    engine, *_ = deeptide.initialize(model=model, optimizer=given, config=config, lr_scheduler=made)
    rates = [given.param_groups[0]["lr"]]
    for number in range(3):
        train(engine, number, number + 1)
        rates.append(given.param_groups[0]["lr"])
    assert engine.get_lr() == rates[-1:]
    assert len(set(rates)) == 4
    engine.destroy()


def test_after_the_engine_it_is_plain_again(make):
    engine, given, _ = start(make)
    train(engine)
    engine.destroy()
    loose = torch.nn.Parameter(torch.ones(3))
    given.param_groups[:] = []
    given.add_param_group({"params": [loose]})
    assert len(given.param_groups) == 1


def test_muons_momentum_is_read_under_torchs_name():
    model = models.make_model()
    config = models.config(2)
    config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2}}
    engine, *_ = deeptide.initialize(model=model, config=config)
    train(engine)
    matrix = next(p for name, p in model.named_parameters() if p.dim() == 2 and "tok" not in name and "emb" not in name)
    momentum = utils.safe_get_full_optimizer_state(matrix, "momentum_buffer")
    assert momentum is not None
    assert momentum.shape == matrix.shape
    engine.destroy()
