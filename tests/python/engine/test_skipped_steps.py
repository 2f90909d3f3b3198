# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Skipped steps: counted, named, and what follows when too many come in a row."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

INF, NAN = float("inf"), float("nan")


def start(world=None, stage=2, optimizer=None, bf16=False, model=None, **policy):
    model = model or models.make_model()
    config = models.config(stage, bf16=bf16, deeptide=policy, **(optimizer or {}))
    return deeptide.initialize(model=model, config=config, world=world)[0]


def step(engine, number, factor=1.0):
    """One step on batch `number`; its loss is multiplied by `factor`."""
    rank, size = engine.world.rank, engine.world.size
    tokens, targets = models.batches(number + 1, 4 * size)[number]
    part = slice(4 * rank, 4 * rank + 4)
    engine.backward(engine(tokens[part], targets[part]) * factor)
    return engine.step()


def state_of(engine, roles=("master", "exp_avg", "exp_avg_sq")):
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in roles}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class Explodes(torch.autograd.Function):
    """Passes its input; its backward gives NaN."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * NAN


def test_forward_and_backward_are_told_apart_on_every_rank():
    def run(world):
        engine = start(world)
        seen = []
        for bad in (lambda loss: loss * INF, Explodes.apply):
            tokens, targets = models.batches(1, 4)[0]
            loss = engine(tokens, targets)
            engine.backward(bad(loss) if world.rank == 1 else loss)
            outcome = engine.step()
            seen.append((outcome.applied, outcome.rank, outcome.phase))
            assert outcome.parameter in dict(engine.module.named_parameters())
            assert f"on rank 1, in {outcome.phase}" in repr(outcome)
        step(engine, 0)
        assert engine.skipped_steps == 2
        return seen

    assert run_ranks(2, run) == [[(False, 1, "forward"), (False, 1, "backward")]] * 2


@pytest.mark.parametrize("stage", range(4))
def test_a_loss_that_zero_grad_dropped_is_not_blamed_for_a_later_gradient(stage):
    """The loss is infinite and its gradient finite: without zero_grad it is the one to blame."""

    def run(world, drops):
        engine = start(world, stage)
        seen = []
        for _ in range(2):
            tokens, targets = models.batches(1, 4)[0]
            engine.backward(engine(tokens, targets) + (INF if world.rank == 1 else 0.0))
            if drops:
                engine.zero_grad()
            loss = engine(tokens, targets)
            engine.backward(Explodes.apply(loss) if world.rank == 1 else loss)
            outcome = engine.step()
            seen.append((outcome.applied, outcome.rank, outcome.phase))
        return seen

    assert run_ranks(2, run, True) == [[(False, 1, "backward")] * 2] * 2
    assert run_ranks(2, run, False) == [[(False, 1, "forward")] * 2] * 2


@pytest.mark.parametrize("bf16", [False, True])
def test_raise_comes_after_the_limit_and_changes_nothing(bf16):
    def run(world):
        engine = start(world, bf16=bf16, on_skipped="raise", skipped_limit=2)
        assert step(engine, 0)
        before = state_of(engine)
        assert not step(engine, 1, NAN)
        assert step(engine, 1, 1.0)  # an applied step ends the row
        before = state_of(engine)
        assert not step(engine, 2, NAN if world.rank == 0 else 1.0)
        with pytest.raises(deeptide.NonFiniteError, match=r"step 5: 2 steps in a row were skipped.*rank 0, in forward"):
            step(engine, 2, NAN if world.rank == 0 else 1.0)
        assert_same(state_of(engine), before)
        assert (engine.skipped_steps, engine.global_steps) == (3, 5)
        assert step(engine, 3)  # who catches it may go on

    run_ranks(2, run)


def test_skip_is_the_default_and_never_ends():
    engine = start()
    for _ in range(30):
        assert not step(engine, 0, INF)
    assert engine.skipped_steps == 30


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_a_rewind_returns_to_the_state_that_trained_last(stage, bf16):
    def run(world):
        engine = start(world, stage, bf16=bf16, on_skipped="rewind", skipped_limit=2, rewind_interval=2)
        step(engine, 0)
        step(engine, 1)
        kept = state_of(engine)  # before the third step the first copy is replaced
        step(engine, 2)
        step(engine, 3, NAN)
        outcome = step(engine, 3, NAN)
        assert not outcome.applied and outcome.rewound_to == 2
        assert_same(state_of(engine), kept)
        assert (engine.global_steps, engine.skipped_steps) == (5, 2)
        again = [step(engine, number) for number in (2, 3)]
        assert all(again)
        return state_of(engine)

    def straight(world):
        engine = start(world, stage, bf16=bf16)
        for number in range(4):
            step(engine, number)
        return state_of(engine)

    for rewound, expected in zip(run_ranks(2, run), run_ranks(2, straight), strict=True):
        assert_same(rewound, expected)


def test_a_rewind_brings_back_buffers_the_schedule_and_a_callers_optimizer():
    class Model(models.TinyModel):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, tokens, targets=None):
            self.count += 1
            return super().forward(tokens, targets)

    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}}
    model = models.make_model(kind=Model)
    engine = deeptide.initialize(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters()),
        config=models.config(2, scheduler=schedule, deeptide={"on_skipped": "rewind", "skipped_limit": 1}),
    )[0]
    step(engine, 0)
    step(engine, 1)
    rate = engine.get_lr()
    assert step(engine, 2, NAN).rewound_to == 0
    assert engine.get_lr() != rate and engine.get_lr() == [0.0]
    assert model.count == 1  # the copy was made in the first step, after its forward
    for number in (0, 1):
        step(engine, number)
    assert engine.get_lr() == rate
    straight = models.make_model(kind=Model)
    other = deeptide.initialize(
        model=straight,
        optimizer=torch.optim.NAdam(straight.parameters()),
        config=models.config(2, scheduler=schedule),
    )[0]
    for number in (0, 1):
        step(other, number)
    roles = ("master", "exp_avg", "exp_avg_sq")
    assert_same(state_of(engine, roles), state_of(other, roles))


def test_a_rewind_that_does_not_help_is_an_error():
    engine = start(on_skipped="rewind", skipped_limit=1)
    with pytest.raises(deeptide.NonFiniteError, match="there is no state yet to return to"):
        step(engine, 0, NAN)
    step(engine, 0)
    assert step(engine, 1, NAN).rewound_to == 1
    with pytest.raises(deeptide.NonFiniteError, match="no step was applied since the return to the state of step 1"):
        step(engine, 1, NAN)


def test_memory_for_a_rewind_is_predicted_and_returned():
    engine = start(on_skipped="rewind", bf16=True)
    step(engine, 0)
    line = next(line for line in engine.memory() if line.role == "optimizer states")
    assert line.predicted_bytes == line.measured_bytes
    plain = next(line for line in start(bf16=True).memory() if line.role == "optimizer states")
    assert line.predicted_bytes == 2 * plain.predicted_bytes


def test_overflows_that_a_lower_loss_scale_may_mend_do_not_count():
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}
    model = torch.nn.Linear(4, 1)
    engine = deeptide.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "fp16": fp16,
            "deeptide": {"on_skipped": "raise", "skipped_limit": 2},
        },
    )[0]

    def overflow():
        engine.backward(model(torch.ones(1, 4, dtype=torch.float16)).float().sum() * INF)
        return engine.step()

    for scale in (4, 2, 1):  # falling to the minimum
        assert not overflow() and engine.cur_scale == scale
    assert not overflow()
    with pytest.raises(deeptide.NonFiniteError, match="2 steps in a row"):
        overflow()
    assert engine.skipped_steps == 5


def test_a_row_of_skipped_steps_goes_on_after_a_checkpoint(tmp_path):
    engine = start(on_skipped="raise", skipped_limit=2)
    step(engine, 0)
    step(engine, 1, NAN)
    engine.save_checkpoint(str(tmp_path))
    resumed = start(on_skipped="raise", skipped_limit=2)
    resumed.load_checkpoint(str(tmp_path))
    with pytest.raises(deeptide.NonFiniteError):
        step(resumed, 1, NAN)


def test_a_rewind_does_not_go_with_states_in_files(tmp_path):
    with pytest.raises(deeptide.ConfigError, match='on_skipped "rewind" keeps a copy of the states in memory'):
        deeptide.initialize(
            model=models.make_model(),
            config=models.config(
                2,
                deeptide={"on_skipped": "rewind"},
                zero={"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
            ),
        )


def test_a_schedule_of_the_callers_does_not_follow_a_skipped_step():
    model = models.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = deeptide.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=models.config(1))[0]
    step(engine, 0)
    step(engine, 1, NAN)
    assert engine.get_lr() == [0.25]
