# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""From torch's optimizers, groups and schedules to the engine's, and back."""

import gc
import warnings
import weakref

import pytest
import torch

import deeptide
from deeptide import utils

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
NO_OPTIMIZER = {"train_micro_batch_size_per_gpu": 2}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def start(model=None, config=CONFIG, **arguments):
    return deeptide.initialize(model=model or make_model(), config=config, **arguments)


def train(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        outcome = engine.step()
    return outcome


def test_default_is_the_configurations_over_all_trainable_parameters():
    model = make_model()
    model[0].weight.requires_grad_(False)
    engine, optimizer, _, _ = start(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters() if p.requires_grad
    ]
    assert engine._core.group_parameters(0) == ["0.bias", "2.weight", "2.bias"]
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_parameters_given_are_the_only_ones_that_move():
    model = make_model()
    before = model[0].weight.detach().clone()
    engine, _, _, _ = start(model, model_parameters=model[2].parameters())
    last = engine.module_state_dict()["2.weight"].clone()
    train(engine)
    after = engine.module_state_dict()
    assert torch.equal(after["0.weight"], before)
    assert not torch.equal(after["2.weight"], last)


@pytest.mark.costly
def test_groups_keep_their_own_hyperparameters():
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": [model[2].weight]},
        {"params": model[2].bias, "eps": 1e-6},
    ]
    engine, optimizer, _, _ = start(model, model_parameters=groups)
    core = [engine._core.hyperparameters(i) for i in range(3)]
    assert [h["lr"] for h in core] == [0.5, 0.01, 0.01]
    assert [h["beta1"] for h in core] == [0.8, 0.9, 0.9]
    assert core[0]["weight_decay"] == 0.1 and core[2]["eps"] == 1e-6
    assert engine.get_lr() == [0.5, 0.01, 0.01]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_groups_without_a_trainable_parameter_are_left_out_of_the_core():
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 0.25}]
    engine, optimizer, _, _ = start(model, model_parameters=groups)
    assert engine.get_lr() == [0.25]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    optimizer.param_groups[1]["lr"] = 0.125
    assert train(engine).lr == 0.125


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2, betas=(0.5, 0.6)), (0.1, 0.2, 0.5, True)),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2, betas=(0.5, 0.6)), (0.1, 0.2, 0.5, False)),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5), fused=True), (0.5, 0.0, 0.9, False)),
    ],
)
def test_torchs_adams_become_ours(make, expected):
    model = make_model()
    engine, optimizer, _, _ = start(model, config=NO_OPTIMIZER, optimizer=make(model.parameters()))
    values = engine._core.hyperparameters(0)
    names = ("lr", "weight_decay", "beta1", "decoupled_weight_decay")
    assert tuple(values[name] for name in names) == expected
    assert optimizer.info.name == "Adam"


def test_torchs_sgd_becomes_ours():
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    engine, _, _, _ = start(model, optimizer=sgd)  # over the configuration's AdamW
    values = engine._core.hyperparameters(0)
    assert (values["lr"], values["momentum"], values["nesterov"]) == (0.1, 0.9, True)
    assert engine.get_mom() == [0.9]


def test_a_function_of_parameters_makes_the_optimizer():
    model = make_model()
    engine, _, _, _ = start(model, config=NO_OPTIMIZER, optimizer=lambda p: torch.optim.SGD(p, lr=0.25))
    assert engine.get_lr() == [0.25]
    parameters = list(model[2].parameters())
    engine.destroy()
    engine, _, _, _ = start(
        model, config=NO_OPTIMIZER, model_parameters=parameters, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
    )
    assert engine._core.group_parameters(0) == ["2.weight", "2.bias"]


def test_without_any_optimizer_the_engine_evaluates_only():
    engine, optimizer, _, scheduler = start(config=NO_OPTIMIZER)
    assert optimizer is None and scheduler is None
    loss = engine(torch.ones(2, 4)).sum()
    with pytest.raises(ValueError, match="optimizer"):
        engine.backward(loss)


def stepped_adam(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "torch.optim.LBFGS: its step.. needs a closure"),
        (lambda m: torch.optim.Adam(make_model().parameters()), "is not one of the model's"),
        (lambda m: lambda parameters: 3, "got int"),
        (lambda m: "adam", "got str"),
        (stepped_adam, "already stepped"),
    ],
)
def test_optimizer_is_refused_if(optimizer, text):
    model = make_model()
    with pytest.raises(deeptide.ConfigError, match=text):
        start(model, optimizer=optimizer(model))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (lambda m: [], "model_parameters is empty"),
        (lambda m: m[0].weight, "got a tensor"),
        (lambda m: [{"lr": 1.0}], "group 0 has no 'params'"),
        (lambda m: [torch.nn.Parameter(torch.ones(3, 5))], r"parameter 0 of shape \(3, 5\) is not one"),
        (lambda m: [{"params": [m[0].weight]}, {"params": m[0].parameters()}], "'0.weight' is given twice"),
        (lambda m: [m[0].weight, m[0].weight], "'0.weight' is given twice: in optimizer group 0 and in group 0"),
        (lambda m: [{"params": m.parameters(), "learning_rate": 1.0}], "unknown key 'learning_rate'"),
        (lambda m: [{"params": m.parameters(), "lr": -1.0}], "lr=-1.0, expected a number of at least 0"),
        (lambda m: [{"params": m.parameters(), "betas": (0.9, 1.0)}], r"expected both in \[0, 1\)"),
    ],
)
def test_model_parameters_are_refused_if(parameters, text):
    model = make_model()
    with pytest.raises(deeptide.ConfigError, match=text):
        start(model, model_parameters=parameters(model))


def test_a_model_without_trainable_parameters_is_refused():
    model = make_model().requires_grad_(False)
    with pytest.raises(deeptide.ConfigError, match="no trainable parameter"):
        start(model)


def test_what_is_written_into_a_group_is_what_the_next_step_uses():
    engine, optimizer, _, _ = start()
    optimizer.param_groups[0]["lr"] = 0.125
    assert train(engine).lr == 0.125
    assert optimizer.param_groups[0]["lr"] == 0.125


def write_in_a_list(group):
    group["betas"][1] = 0.5


def replace_by_a_list(group):
    group["betas"] = [0.75, 0.5]


def write_in_a_tensor(group):
    group["lr"].fill_(0.5)


@pytest.mark.parametrize(
    ("write", "name", "value"),
    [
        (lambda group: group.update(lr=0.5), "lr", 0.5),
        (lambda group: group.update(betas=(0.75, 0.5)), "beta2", 0.5),
        (lambda group: group.update(weight_decay=torch.tensor(0.5)), "weight_decay", 0.5),
        (lambda group: group.update(decoupled_weight_decay=False), "decoupled_weight_decay", 0.0),
        (replace_by_a_list, "beta2", 0.5),
        (write_in_a_list, "beta2", 0.5),
        (write_in_a_tensor, "lr", 0.5),
    ],
)
def test_each_way_to_write_into_a_group_reaches_the_core_and_others_stay(write, name, value):
    model = make_model()
    lr = torch.tensor(0.25) if write is write_in_a_tensor else 0.25
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr}]
    client = torch.optim.AdamW(groups, lr=0.25)
    engine, optimizer, _, _ = start(model, config=NO_OPTIMIZER, optimizer=client)
    group = optimizer.param_groups[1]
    if write is write_in_a_list:
        group["betas"] = [0.75, 0.625]
    train(engine)
    before = [dict(engine._core.hyperparameters(number)) for number in range(2)]
    write(group)
    train(engine, 2)
    after = [dict(engine._core.hyperparameters(number)) for number in range(2)]
    assert before[1][name] != value
    assert after == [before[0], {**before[1], name: value, **({"beta1": 0.75} if name == "beta2" else {})}]


def test_a_value_that_is_no_number_is_refused_and_forgotten():
    engine, optimizer, _, _ = start()
    group = optimizer.param_groups[0]
    group.update(lr=0.5, betas=(0.5,))
    for _ in range(2):
        with pytest.raises(deeptide.ConfigError, match=r"betas=\(0.5,\), expected 2 numbers"):
            train(engine)
    group.update(lr=0.01, betas=(0.75, 0.5))
    train(engine)
    assert engine.get_lr() == [0.01] and engine.get_mom() == [(0.75, 0.5)]


def test_a_value_that_the_core_refuses_is_forgotten_too():
    engine, optimizer, _, _ = start()
    group = optimizer.param_groups[0]
    train(engine)
    rate = group["lr"]
    group["lr"] = -1.0
    with pytest.raises(ValueError, match="lr is -1, expected a number of at least 0"):
        train(engine)
    group.update(lr=rate, betas=(0.75, 0.5))  # the next change of the group, by another key
    train(engine)
    assert engine.get_lr() == [rate] and engine.get_mom() == [(0.75, 0.5)]


def test_a_key_that_was_taken_out_comes_back():
    engine, optimizer, _, _ = start()
    del optimizer.param_groups[0]["eps"]
    optimizer.param_groups[0]["lr"] = 0.125
    assert train(engine).lr == 0.125
    assert optimizer.param_groups[0]["eps"] == 1e-8


class Calls:
    """An engine's core that counts."""

    def __init__(self, core, version=None):
        self.core, self.sets, self.gets = core, 0, 0
        if version is not None:
            self.hyperparameters_version = lambda: version[0]

    def set_hyperparameters(self, number, values):
        self.sets += 1
        self.core.set_hyperparameters(number, values)

    def hyperparameters(self, number):
        self.gets += 1
        return self.core.hyperparameters(number)


def test_groups_that_nobody_changed_cost_no_call_of_the_core():
    engine, optimizer, _, _ = start()
    version = [0]
    calls = Calls(engine._core, version)
    with optimizer.synced(calls):
        pass
    calls.gets = 0
    for lr in (0.5, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        with optimizer.synced(calls):
            pass
    assert (calls.sets, calls.gets) == (2, 0)
    values = engine._core.hyperparameters(0)
    values["lr"] = 0.125
    engine._core.set_hyperparameters(0, values)
    with optimizer.synced(calls):
        version[0] += 1
    assert (calls.sets, calls.gets) == (2, 1)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_the_optimizers_step_is_the_engines():
    engine, optimizer, _, _ = start()
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    assert optimizer.step()
    assert engine.global_steps == 1
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"step\(\) before backward\(\)"):
        engine.step()


def test_the_models_zero_grad_drops_what_the_engine_has():
    engine, _, _, _ = start()
    weight = engine.module[0].weight
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    assert utils.safe_get_full_grad(weight) is not None
    engine.module.zero_grad()
    assert utils.safe_get_full_grad(weight) is None


def test_the_optimizer_says_where_its_state_is():
    _engine, optimizer, _, _ = start()
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="load_checkpoint"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="closures"):
        optimizer.step(lambda: None)


def test_the_optimizer_does_not_keep_the_engine_alive():
    engine, optimizer, _loader, scheduler = start(config={**CONFIG, "scheduler": SCHEDULE})
    train(engine)
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="engine is gone"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="engine is gone"):
        scheduler.get_last_lr()


def test_get_lr_and_get_mom_say_what_the_groups_hold():
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    engine, optimizer, _, _ = start(lr_scheduler=halve)
    before = engine.get_lr()[0]
    train(engine)
    assert engine.get_lr() == [before / 2] == [optimizer.param_groups[0]["lr"]]
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)
    assert engine.get_mom() == [(0.5, 0.75)]


def test_the_configurations_schedule_moves_the_live_groups():
    engine, optimizer, _, scheduler = start(config={**CONFIG, "scheduler": SCHEDULE})
    seen = []
    for _ in range(4):
        train(engine)
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == engine.get_lr() == [seen[-1]]
    assert seen == sorted(set(seen)), "a warm-up rises with each step"
    assert scheduler.state_dict() == {"last_batch_iteration": 3}
    with pytest.raises(RuntimeError, match="load_checkpoint"):
        scheduler.load_state_dict({})


@pytest.mark.parametrize("as_function", [False, True])
def test_a_torch_schedule_is_stepped_with_the_engine(as_function):
    model = make_model()
    client = torch.optim.AdamW(model.parameters(), lr=1.0)
    make = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, _, _, scheduler = start(model, optimizer=client, lr_scheduler=make if as_function else make(client))
        lrs = [train(engine).lr for _ in range(3)]
    assert lrs == [1.0, 0.5, 0.25]
    assert scheduler.get_last_lr() == [0.125]


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def step(engine, **arguments):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    return engine.step(**arguments)


def test_a_schedule_that_wants_a_metric_follows_when_it_is_given(recwarn):
    engine, _, _, scheduler = start(lr_scheduler=plateau)
    lrs = [step(engine, lr_kwargs={"metrics": metric}).lr for metric in (1.0, 2.0, 0.5, torch.tensor(3.0))]
    assert lrs == [0.01, 0.01, 0.005, 0.005]
    assert scheduler.get_last_lr() == [0.0025]
    assert not recwarn.list


def test_a_schedule_that_wants_a_metric_is_left_alone_without_and_that_is_said_once(recwarn):
    engine, _, _, scheduler = start(lr_scheduler=plateau)
    assert all(step(engine).lr == 0.01 for _ in range(3))
    assert scheduler.last_epoch == 0
    lines = [str(warning.message) for warning in recwarn.list]
    assert len(lines) == 1 and 'engine.step(lr_kwargs={"metrics": …})' in lines[0]
    for metric in (1.0, 2.0):  # as an epoch's end does
        scheduler.step(metric)
    assert step(engine).lr == 0.005


def test_arguments_that_a_schedule_does_not_take_are_refused_before_the_step():
    engine, _, _, _ = start(lr_scheduler=plateau)
    with pytest.raises(deeptide.ConfigError, match=r"got lr_kwargs with 'metric', expected arguments of ReduceLROn"):
        step(engine, lr_kwargs={"metric": 1.0})
    assert engine.global_steps == 0
    assert engine.step(lr_kwargs={"metrics": 1.0}).step == 1


def test_the_callers_schedule_replaces_the_configurations():
    make = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # noqa: E731
    engine, _, _, _ = start(config={**CONFIG, "scheduler": SCHEDULE}, lr_scheduler=make)
    assert [train(engine).lr for _ in range(3)] == [0.01] * 3


def test_a_torch_schedule_waits_if_the_step_is_skipped():
    make = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # noqa: E731
    engine, optimizer, _, _ = start(lr_scheduler=make)
    engine.backward(engine(torch.full((2, 4), float("nan"))).sum())
    outcome = engine.step()
    assert not outcome and not engine.was_step_applied()
    assert "not applied" in repr(outcome) and outcome.reason in repr(outcome)
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("config", "schedule", "text"),
    [
        (CONFIG, 3, "got int, expected a scheduler"),
        (NO_OPTIMIZER, lambda optimizer: None, "there is no optimizer"),
        (
            CONFIG,
            torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], lr=1.0)),
            "bound to another optimizer",
        ),
    ],
)
def test_schedule_is_refused_if(config, schedule, text):
    with pytest.raises(deeptide.ConfigError, match=text):
        start(config=config, lr_scheduler=schedule)


def test_a_refused_call_leaves_the_model_as_it_was():
    model = make_model()
    x = torch.ones(2, 4)
    expected = model(x)
    with pytest.raises(deeptide.ConfigError, match="lr_scheduler: got int, expected a scheduler"):
        start(model, config={**CONFIG, "zero_optimization": {"stage": 3}}, lr_scheduler=3)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("lr", "schedule", "told"),
    [
        (0.5, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}, "rises to 0.25"),
        (0.5, {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}, "rises to 0.2"),
        (0.25, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}, None),
        (1e-3, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}, None),  # the default: nothing was asked for
        (0.5, {"type": "WarmupLR", "params": {}}, None),  # rises to the optimizer's own
    ],
)
def test_a_learning_rate_that_the_schedule_overrides_is_told_once(lr, schedule, told, capfd):
    section = {"type": "AdamW", "params": {"lr": lr}}
    start(config={"train_batch_size": 2, "optimizer": section, "scheduler": schedule})
    errors = capfd.readouterr().err
    assert errors.count("has no effect") == (1 if told else 0)
    if told:
        assert f"lr 0.5 of optimizer group 0 has no effect: the schedule {schedule['type']} {told}" in errors
