# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters change after initialize: rebuilt between steps, or an error that says so."""

import edges
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import utils

pytestmark = pytest.mark.both_ways

STAGES = [0, 2, 3]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


class Staged(nn.Module):
    """Three layers; `second` is frozen at first."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.requires_grad_(False)
        self.head = nn.Linear(width, 1)

    def forward(self, x, skip=False):
        x = torch.tanh(self.first(x))
        return self.head(x if skip else torch.tanh(self.second(x)))


class Lora(nn.Module):
    """Wraps a layer like PEFT: the layer itself gets another name."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        with models._seeding:
            torch.manual_seed(7)
            self.a = nn.Linear(base.in_features, 2, bias=False)
            self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


def new_layer(*sizes):
    with models._seeding:
        torch.manual_seed(8)
        return nn.Linear(*sizes)


def unfreeze(model):
    model.second.requires_grad_(True)


def replace_head(model):
    model.head = new_layer(6, 1)


def add_adapters(model):
    model.first = Lora(model.first)
    model.second = Lora(model.second)


def add_module(model):
    model.add_module("head", nn.Sequential(model.head, new_layer(1, 1)))


def freeze_and_unfreeze(model):
    model.first.requires_grad_(False)
    model.second.requires_grad_(True)


CHANGES = [unfreeze, replace_head, add_adapters, add_module, freeze_and_unfreeze]


def start(world, stage, **extra):
    return edges.start(world, stage, kind=Staged, deeptide={"comm_timeout": 60, **extra.pop("deeptide", {})}, **extra)


def plain_beside(change, ranks):
    """Plain torch doing the same: two steps, the change, three steps."""
    model = models.make_model(kind=Staged)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), **SETTINGS)
    for step in range(2):
        edges.plain_step(model, optimizer, step, ranks)
    change(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad and id(p) not in held]})
    for step in range(2, 5):
        edges.plain_step(model, optimizer, step, ranks)
    return model


# -- what works -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_model_is_trained_as_by_torch_after_a_rebuild(stage, change):
    def program(world):
        engine = start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        change(engine.module)
        engine.rebuild()
        edges.train(engine, 3, first=2, rank=world.rank)
        return edges.final_state(engine)

    model = plain_beside(change, ranks=2)
    for state in run_ranks(2, program):
        assert set(state) == set(model.state_dict())
        edges.assert_trained_as(state, model)


@pytest.mark.parametrize(("bf16", "packed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rebuild_without_a_change_changes_no_bit(stage, bf16, packed):
    """Masters, moments, counts of steps (`second` misses one), the schedule's place, the accumulation."""
    schedule = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}}

    def program(world, rebuilds):
        packing = {"packed_states": packed}
        engine = edges.start(world, stage, bf16=bf16, gas=2, scheduler=schedule, deeptide=packing)
        edges.train(engine, 4, rank=world.rank, skip=True)
        edges.train(engine, 2, first=4, rank=world.rank)
        if rebuilds:
            engine.rebuild()
            assert (engine.global_steps, engine.micro_steps) == (3, 6)
        edges.train(engine, 4, first=6, rank=world.rank)
        moment = utils.safe_get_full_optimizer_state(engine.module.second.weight, "exp_avg_sq")
        master = utils.safe_get_full_fp32_param(engine.module.first.weight)
        return {**edges.final_state(engine), "moment": moment, "master": master, "lr": engine.optimizer.param_groups}

    whole = run_ranks(2, program, False)
    for state, other in zip(run_ranks(2, program, True), whole, strict=True):
        assert state.pop("lr")[0]["lr"] == other.pop("lr")[0]["lr"]
        for name, value in other.items():
            assert torch.equal(state[name], value), name


def test_dynamic_loss_scales_and_skipped_steps_are_kept():
    def program(world):
        fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}
        engine = edges.start(world, 2, fp16=fp16)
        edges.train(engine, 3, rank=world.rank)
        engine.backward(engine(edges.inputs(world.rank).half()).square().mean() * float("inf"))
        assert not engine.step().applied
        before = (engine.cur_scale, engine.skipped_steps, engine.global_steps)
        engine.rebuild()
        assert before == (engine.cur_scale, engine.skipped_steps, engine.global_steps) and before[1] == 1
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_is_added_with_its_own_rate(stage):
    """Gradual unfreezing as torch's users write it: no word of the engine's."""

    def program(world):
        engine = start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        engine.module.second.requires_grad_(True)
        engine.optimizer.add_param_group({"params": engine.module.second.parameters(), "lr": 3e-2})
        edges.train(engine, 3, first=2, rank=world.rank)
        assert engine.get_lr() == [1e-2, 3e-2]
        return edges.final_state(engine)

    model = models.make_model(kind=Staged)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), **SETTINGS)
    for step in range(2):
        edges.plain_step(model, optimizer, step, 2)
    model.second.requires_grad_(True)
    optimizer.add_param_group({"params": model.second.parameters(), "lr": 3e-2})
    for step in range(2, 5):
        edges.plain_step(model, optimizer, step, 2)
    for state in run_ranks(2, program):
        edges.assert_trained_as(state, model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rebuilt_engine_saves_and_loads(stage, tmp_path):
    def program(world):
        engine = start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        add_adapters(engine.module)
        engine.rebuild()
        edges.train(engine, 1, first=2, rank=world.rank)
        engine.save_checkpoint(tmp_path, tag="adapted")
        edges.train(engine, 2, first=3, rank=world.rank)
        went_on = edges.final_state(engine)
        model = models.make_model(kind=Staged)
        add_adapters(model)
        fresh = edges.start(world, stage, model=model, deeptide={"comm_timeout": 60})
        fresh.load_checkpoint(tmp_path, tag="adapted")
        edges.train(fresh, 2, first=3, rank=world.rank)
        return went_on, edges.final_state(fresh)

    for went_on, resumed in run_ranks(2, program):
        assert went_on.keys() == resumed.keys()
        assert all(torch.equal(resumed[name], value) for name, value in went_on.items())


def test_muons_groups_take_new_parameters_by_their_kind():
    muon = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    engine = edges.start(None, 0, optimizer=muon, deeptide={"comm_timeout": 60})
    edges.train(engine)
    matrices, rest = engine.optimizer.param_groups
    engine.module.third = new_layer(6, 6)
    engine.rebuild()
    assert any(p is engine.module.third.weight for p in matrices["params"])
    assert any(p is engine.module.third.bias for p in rest["params"])
    engine.module.fourth = new_layer(6, 6)
    with pytest.raises(deeptide.ConfigError, match="add them as two groups, or say use_muon"):
        engine.optimizer.add_param_group({"params": engine.module.fourth.parameters()})
    engine.optimizer.add_param_group({"params": [engine.module.fourth.weight]})
    assert engine.optimizer.param_groups[2]["use_muon"]
    engine.destroy()


# -- what is an error -------------------------------------------------------------------------------------------------

FORGOTTEN = [
    (unfreeze, r"'second\.weight' was frozen at initialize.*engine\.rebuild\(\)"),
    (replace_head, r"'head\.weight' is new since initialize.*engine\.rebuild\(\)"),
    (add_adapters, r"'first\.a\.weight' is new since initialize.*engine\.rebuild\(\)"),
    (add_module, r"'head\.1\.weight' is new since initialize.*engine\.rebuild\(\)"),
]


@pytest.mark.parametrize(("change", "text"), FORGOTTEN)
@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_rebuild_is_an_error_at_the_next_step(stage, change, text):
    """And the program may mend it there."""

    def program(world):
        engine = start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        change(engine.module)
        with pytest.raises(ValueError, match=text):
            edges.train(engine, rank=world.rank)
        engine.zero_grad()
        engine.rebuild()
        edges.train(engine, 3, first=2, rank=world.rank)
        return edges.final_state(engine)

    model = plain_beside(change, ranks=2)
    for state in run_ranks(2, program):
        edges.assert_trained_as(state, model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_on_one_rank_only_is_an_error_on_all(stage):
    def program(world):
        engine = start(world, stage)
        edges.train(engine, 2, rank=world.rank)
        head = engine.module.head
        if world.rank == 1:
            replace_head(engine.module)
        text = r"'head\.weight' is new since initialize" if world.rank == 1 else r"step\(\) failed on rank 1"
        with pytest.raises((ValueError, RuntimeError), match=text):
            edges.train(engine, rank=world.rank)
        engine.zero_grad()
        groups = engine.optimizer.param_groups
        before = [list(group["params"]) for group in groups]
        with pytest.raises(deeptide.ConfigError, match=r"'head\.weight', .*(?s:.*)Nothing was changed"):
            engine.rebuild()
        assert engine.optimizer.param_groups is groups
        for group, parameters in zip(groups, before, strict=True):
            assert all(p is q for p, q in zip(group["params"], parameters, strict=True))
        engine.module.head = head
        edges.train(engine, 3, first=2, rank=world.rank)
        return edges.final_state(engine)

    one, other = run_ranks(2, program)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def add_double(model):
    model.third = new_layer(6, 6).double()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rebuild_that_is_refused_changes_nothing(stage, bf16):
    def program(world, refuse):
        engine = start(world, stage, bf16=bf16)
        edges.train(engine, 2, rank=world.rank)
        if refuse:
            add_double(engine.module)
            with pytest.raises(ValueError, match=r"'third\.weight' .*Double"):
                engine.rebuild()
            del engine.module.third
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5
        edges.train(engine, 2, first=2, rank=world.rank)
        return models.everything(engine)

    for state, expected in zip(run_ranks(2, program, True), run_ranks(2, program, False)):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name


SIGNS = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}}
# An engine has more than masters and states: {what: (stage, settings)}.
BESIDE_STATES = {
    "where a schedule starts": (2, {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20}}}),
    "a rate of 0": (2, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}),
    "what signs left out": (0, {"optimizer": SIGNS, "gradient_clipping": 0.0}),
    "what rounding left out": (2, {"deeptide": {"quantized_gradients": "int4", "quantized_error_feedback": True}}),
    "a state to return to": (2, {"deeptide": {"on_skipped": "rewind", "skipped_limit": 1}}),
}


REBUILDS = [(what, True) for what in BESIDE_STATES] + [(w, False) for w in BESIDE_STATES if w != "a state to return to"]


@pytest.mark.parametrize("case", REBUILDS, ids=str)
def test_a_rebuild_of_the_same_model_keeps_what_lies_beside_states(case):
    what, refused = case
    stage, settings = BESIDE_STATES[what]
    steps = 0 if what == "a rate of 0" else 3

    def program(world, rebuilds):
        engine = start(world, stage, **settings)
        if steps:
            edges.train(engine, steps, rank=world.rank)
        if rebuilds and refused:
            add_double(engine.module)
            with pytest.raises(ValueError, match=r"'third\.weight' .*Double"):
                engine.rebuild()
            del engine.module.third
        elif rebuilds:
            engine.rebuild()
        returned_to = None
        if what == "a state to return to":
            engine.backward(engine(edges.inputs()).square().mean() * float("nan"))
            returned_to = engine.step().rewound_to
            assert returned_to is not None
        rates = []
        for number in range(3):
            edges.train(engine, first=steps + number, rank=world.rank)
            rates.append(engine.get_lr())
        return models.everything(engine), rates, returned_to

    for rebuilt, expected in zip(run_ranks(2, program, True), run_ranks(2, program, False), strict=True):
        models.assert_same(rebuilt[0], expected[0])
        assert rebuilt[1:] == expected[1:]


def test_a_refused_group_leaves_no_rate_behind():
    model = models.make_model(kind=Staged)
    for layer in (model.first, model.head):
        layer.weight.requires_grad_(False)  # so that Muon's group is the new layer's alone
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    engine = edges.start(stage=2, model=model, optimizer={"type": "Muon"}, scheduler=warm_up)
    before = dict(engine.optimizer.plan.starts)
    add_double(engine.module)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'third\.weight' .*Double"):
            engine.optimizer.add_param_group({"params": [engine.module.third.weight], "lr": 0.5})
        with pytest.raises(ValueError, match=r"'third\.weight' .*Double"):
            engine.rebuild()
    assert engine.optimizer.plan.starts == before
    engine.destroy()


def test_a_rank_that_rebuilds_while_another_steps_is_named():
    def program(world):
        engine = start(world, 2)
        edges.train(engine, rank=world.rank)
        with pytest.raises(deeptide.CommError, match=r"rank 0 called rebuild\(\), rank 1 called step\(\)"):
            engine.rebuild() if world.rank == 0 else edges.train(engine, rank=world.rank)
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rebuild_would_lose_gradients(stage):
    def program(world):
        engine = start(world, stage, gas=2)
        engine.backward(engine(edges.inputs(world.rank)).square().mean())
        with pytest.raises(ValueError, match=r"rebuild between backward\(\) and step\(\)"):
            engine.rebuild()
        engine.step()
        with pytest.raises(ValueError, match=r"rebuild .* the gradients would be lost"):
            engine.rebuild()
        edges.train(engine, first=1, rank=world.rank)
        engine.rebuild()
        assert engine.global_steps == 1
        engine.destroy()

    run_ranks(2, program)


def test_a_new_parameter_outside_of_the_callers_groups_is_named():
    model = models.make_model(kind=Staged)
    optimizer = torch.optim.AdamW(model.first.parameters(), **SETTINGS)  # head is left out, on purpose
    config = models.config(0)
    del config["optimizer"]
    engine, optimizer, _, _ = deeptide.initialize(model=model, optimizer=optimizer, config=config)
    edges.train(engine)
    head = model.head.weight.detach().clone()
    model.third = new_layer(6, 6)
    with pytest.raises(deeptide.ConfigError, match=r"'third\.weight' requires a gradient and is in no group.*1 others"):
        engine.rebuild()
    optimizer.add_param_group({"params": model.third.parameters(), "weight_decay": 0.0})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    edges.train(engine)
    assert torch.equal(model.head.weight, head)
    engine.destroy()


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (lambda model: {"params": [torch.zeros(3)]}, r"shape \(3,\) is not one of the model's"),
        (lambda model: {"params": [model.head.weight]}, "in another group already"),
        (lambda model: {"params": model.second.parameters(), "rate": 1.0}, "unknown key 'rate'"),
        (lambda model: {"params": model.second.parameters(), "lr": -1.0}, r"lr=-1.0, expected"),
    ],
)
def test_a_group_that_cannot_be_added_is_refused_and_leaves_no_trace(group, text):
    engine = start(None, 0)
    with pytest.raises(deeptide.ConfigError, match=text):
        engine.optimizer.add_param_group(group(engine.module))
    assert len(engine.optimizer.param_groups) == 1
    edges.train(engine)
    engine.destroy()


def test_what_cannot_be_carried_over_is_refused_and_training_goes_on(tmp_path):
    class Own(torch.optim.SGD):
        pass

    model = models.make_model(kind=Staged)
    config = models.config(0)
    del config["optimizer"]
    engine, optimizer, _, _ = deeptide.initialize(model=model, optimizer=Own(model.parameters(), lr=0.1), config=config)
    with pytest.raises(ValueError, match="rebuild: an optimizer of the program's own"):
        engine.rebuild()
    with pytest.raises(deeptide.ConfigError, match="add_param_group: an optimizer of the program's own"):
        optimizer.add_param_group({"params": [model.head.weight]})
    edges.train(engine)
    engine.destroy()
    engine = edges.start(None, 2, kind=Staged)
    engine.offload_states()
    with pytest.raises(ValueError, match="rebuild while states are offloaded: call reload_states"):
        engine.rebuild()
    engine.reload_states()
    engine.rebuild()
    edges.train(engine)
    engine.destroy()
    files = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = edges.start(None, 2, kind=Staged, zero=files)
    with pytest.raises(ValueError, match="rebuild: states or parameters lie in files"):
        engine.rebuild()
    edges.train(engine)
    engine.destroy()


def test_new_parameters_are_known_by_every_name():
    engine = start(None, 3)
    edges.train(engine)
    replace_head(engine.module)
    engine.rebuild()
    edges.train(engine)
    master = utils.safe_get_full_fp32_param(engine.module.head.weight)
    assert torch.equal(master, engine.module.head.weight.detach())
    assert utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg").abs().sum() > 0
    engine.destroy()


def test_a_codebook_that_is_replaced_in_each_step_needs_no_rebuild():
    """Without a gradient nothing is lost: it is saved as it is."""
    engine = edges.start(None, 0)
    engine.module.register_parameter("codes", nn.Parameter(torch.zeros(3)))
    for step in range(3):
        engine.module.codes = nn.Parameter(engine.module.codes.detach() + 1)
        edges.train(engine, first=step)
    assert torch.equal(engine.module_state_dict()["codes"], torch.full((3,), 3.0))
    engine.destroy()
