# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that travel in 8 or 4 bits: within their bound, the same on all ranks, in all stages and in every run."""

import re

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

RATE = 0.5
# An element is rounded by at most half a step of its block, and fp32 rounds quotient and product.
BOUND = {"int8": 0.5 / 127 + 3e-7, "int4": 0.5 / 7 + 3e-7}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}, "gradient_clipping": 0.0}


def start(world, stage, width, own=None, **extra):
    config = models.config(
        stage, world=world.size, deeptide={**({"quantized_gradients": width} if width else {}), **(own or {})}, **extra
    )
    return deeptide.initialize(model=models.make_model(), config=config, world=world)[0]


def train(engine, world, first, last):
    losses, outcomes = [], []
    for number in range(first, last):
        tokens, targets = (part.chunk(world.size)[world.rank] for part in models.batches(number + 1, 4)[number])
        loss = engine(tokens, targets)
        engine.backward(loss)
        outcomes.append(engine.step())
        losses.append(loss.item())
    return losses, outcomes


def run(world, stage, width, steps=3, **extra):
    engine = start(world, stage, width, **extra)
    losses, outcomes = train(engine, world, 0, steps)
    return losses, models.everything(engine), outcomes


def own_gradients(rank):
    model = models.make_model()
    tokens, targets = (part.chunk(2)[rank] for part in models.batches(1, 4)[0])
    loss = model(tokens, targets)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.apart
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("width", ["int8", "int4"])
def test_a_step_stays_within_the_bound(width, stage):
    """Against plain torch: the mean of two gradients, each of which errs by the bound times its largest element."""
    _, state, (outcome,) = run_ranks(2, lambda world: run(world, stage, width, 1, **SGD))[0]
    gradients = [own_gradients(rank) for rank in range(2)]
    allowed = sum(max(g.abs().max().item() for g in each.values()) for each in gradients) / 2 * BOUND[width]
    begun = dict(models.make_model().named_parameters())
    moved, largest = 0.0, 0.0
    for name, parameter in begun.items():
        exact = parameter.detach() - RATE * (gradients[0][name] + gradients[1][name]) / 2
        off = (state[name] - exact).abs().max().item()
        assert off <= RATE * allowed + 1e-6, name
        largest = max(largest, off)
        moved = max(moved, (exact - parameter).abs().max().item())
    assert largest > 1e-6, "something was rounded"
    assert moved > (20 if width == "int8" else 2) * largest
    assert 0 < outcome.largest_rounding <= BOUND[width]
    # A block's root mean square is at least its largest element over the root of 128.
    assert 0 < outcome.rounding <= BOUND[width] * 128**0.5


@pytest.mark.apart
@pytest.mark.parametrize("width", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gas", [1, 2])
def test_ranks_runs_and_stages_agree_bit_for_bit(gas, dtype, width):
    extra = {"bf16": dtype == "bf16", "gas": gas}
    if dtype == "fp16":
        extra["fp16"] = {"enabled": True, "initial_scale_power": 8}
    first, again, *stages = (
        run_ranks(2, lambda world, s=stage: run(world, s, width, 4, **extra)) for stage in (2, 2, 3, 3)
    )
    for results in (again, *stages):
        for (losses, state, outcomes), (others, theirs, their_outcomes) in zip(first, results, strict=True):
            assert losses == others
            models.assert_same(state, theirs)
            assert [o.grad_norm for o in outcomes if o.applied] == [o.grad_norm for o in their_outcomes if o.applied]
    models.assert_same(first[0][1], first[1][1])
    assert [o.rounding for o in first[0][2]] == [o.rounding for o in first[1][2]]


@pytest.mark.apart
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_learns_and_resumes_exactly(stage, tmp_path):
    def learn(world):
        engine = start(world, stage, "int4")
        losses, _ = train(engine, world, 0, 4)
        engine.save_checkpoint(tmp_path)
        rest, outcomes = train(engine, world, 4, 8)
        again = start(world, stage, "int4")
        again.load_checkpoint(tmp_path)
        assert train(again, world, 4, 8)[0] == rest
        models.assert_same(models.everything(engine), models.everything(again))
        assert all(0 < outcome.rounding < 1 for outcome in outcomes)
        return losses + rest

    assert all(losses[-1] < losses[0] for losses in run_ranks(2, learn))


@pytest.mark.apart
def test_messages_are_as_small_as_they_say():
    """Stage 2 sends gradients and what it publishes; the latter does not change."""
    sent = {width: run_ranks(2, run, 2, width, 2)[0][2][-1].sent_bytes for width in (None, "int8", "int4")}
    # A rank sends half of each unit, in blocks of 128: 132 or 68 bytes for what are 512.
    whole = sent[None] - sent["int8"]
    assert 0 < whole < sent["int8"] + whole
    assert sent["int8"] - sent["int4"] == pytest.approx((132 - 68) / (512 - 132) * whole, rel=0.1)


@pytest.mark.apart
def test_deepspeeds_key_means_int4():
    def by_key(world):
        return run(world, 3, None, zero={"zero_quantized_gradients": True})[1]

    both = (lambda world: run(world, 3, "int4")[1]), by_key
    one, other = (run_ranks(2, each)[0] for each in both)
    models.assert_same(one, other)

    def wider(world):
        return run(world, 3, "int8", zero={"zero_quantized_gradients": True})[1]

    models.assert_same(run_ranks(2, wider)[0], run_ranks(2, lambda world: run(world, 3, "int8")[1])[0])


@pytest.mark.apart
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_named(bad, stage):
    def fail(world):
        engine = start(world, stage, "int4")
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        tokens, targets = (part.chunk(2)[world.rank] for part in models.batches(1, 4)[0])
        loss = engine(tokens, targets)
        poisoned = engine.module.h[1].up.bias
        handle = poisoned.register_hook(lambda g: g.index_fill(0, torch.tensor([5]), bad) if world.rank == 1 else g)
        engine.backward(loss)
        handle.remove()
        outcome = engine.step()
        models.assert_same(engine.module_state_dict(), before)
        return outcome.applied, outcome.parameter, outcome.rank

    assert run_ranks(2, fail) == [(False, "h.1.up.bias", 1)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_memory_round_nothing(ranks):
    def results(world, width):
        engine = start(world, 2, width)
        losses, outcomes = train(engine, world, 0, 2)
        assert all(outcome.rounding == outcome.largest_rounding == 0 for outcome in outcomes)
        return losses, "quantized gradients: none" in engine.summary()

    plain, quantized = (run_ranks(ranks, results, width) for width in (None, "int4"))
    assert [losses for losses, _ in plain] == [losses for losses, _ in quantized]
    assert all(says for _, says in quantized) and not any(says for _, says in plain)


@pytest.mark.apart
def test_the_summary_and_the_lines_of_steps_state_bound_and_error(capfd):
    def tell(world):
        engine = start(world, 2, "int4", steps_per_print=1)
        train(engine, world, 0, 1)
        return engine.summary()

    text = run_ranks(2, tell)[0]
    assert "reduce int4" in text
    assert "quantized gradients: int4, one scale per 128 elements; rounded by at most 7.14 % of the largest" in text
    assert re.search(r"rounding 0\.\d+ \(largest 0\.0714 of its block's largest\)", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"zero_optimization": {"zero_quantized_gradients": True}, "deeptide": {"quantized_gradients": "off"}},
            'quantized_gradients: "off" contradicts zero_optimization.zero_quantized_gradients',
        ),
        (
            {"deeptide": {"quantized_gradients": "int8", "reduction": "transport"}},
            'quantized_gradients: needs deeptide.reduction "ordered"',
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}, "communication_data_type": "bf16"},
            'communication_data_type: "bf16" contradicts zero_optimization.zero_quantized_gradients',
        ),
        ({"deeptide": {"quantized_gradients": "int2"}}, "int2"),
        (
            {"deeptide": {"quantized_gradients": "int8"}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
            "quantized gradients do not go with OneBitAdam, whose ranks exchange signs",
        ),
    ],
)
def test_contradictions_are_named(changes, text):
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **changes}
    with pytest.raises(deeptide.ConfigError) as error:
        deeptide.initialize(model=models.make_model(), config=config)
    assert text in str(error.value)


FED = {"quantized_error_feedback": True}


def learn_and_resume(world, stage, dtype, folder, first):
    """A run that saves on its way and one that goes on from there end with the same bits, errors included."""
    extra = {"bf16": dtype == "bf16"} | (
        {"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}
    )
    engine = start(world, stage, "int4", own=FED, **extra)
    train(engine, world, 0, first)
    engine.save_checkpoint(folder)
    rest = train(engine, world, first, first + 3)[0]
    again = start(world, stage, "int4", own=FED, **extra)
    again.load_checkpoint(folder)
    assert train(again, world, first, first + 3)[0] == rest
    models.assert_same(models.everything(engine), models.everything(again))
    off = start(world, stage, "int4", **extra)
    off.load_checkpoint(folder)  # has no use for the errors, and no quarrel with them
    assert train(off, world, first, first + 3)[0] != rest, "the errors do something"
    return rest


@pytest.mark.apart
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_error_feedback_resumes_exactly(stage, dtype, tmp_path):
    run_ranks(2, learn_and_resume, stage, dtype, tmp_path, 4)


@pytest.mark.apart
def test_errors_start_anew_on_another_number_of_ranks(tmp_path):
    def save(world):
        engine = start(world, 2, "int4", own=FED)
        train(engine, world, 0, 3)
        engine.save_checkpoint(tmp_path)

    def load(world, own):
        engine = start(world, 2, "int4", own=own)
        engine.load_checkpoint(tmp_path)
        tokens, targets = models.batches(1, 12)[0]
        loss = engine(*(part.chunk(world.size)[world.rank] for part in (tokens, targets)))
        engine.backward(loss)
        engine.step()
        return models.everything(engine)

    run_ranks(2, save)
    models.assert_same(run_ranks(3, load, FED)[0], run_ranks(3, load, None)[0])


@pytest.mark.apart
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_error_feedback_is_in_plan_and_ledger(stage):
    def measure(world, own):
        engine = start(world, stage, "int4", own=own)
        train(engine, world, 0, 2)
        memory = {entry.role: entry for entry in engine.memory()}
        found = memory["communication"]
        assert found.measured_bytes <= found.predicted_bytes
        return found.predicted_bytes, found.measured_bytes, engine.summary()

    (with_it, held, text), (without, held_without, other) = (run_ranks(2, measure, own)[0] for own in (FED, None))
    numel = sum(parameter.numel() for parameter in models.make_model().parameters())
    assert numel * 4 <= with_it - without < numel * 4 * 1.5 + 4096, "fp32, and the units' padding"
    assert held - held_without == with_it - without
    assert "the error is added to the next gradients" in text
    assert "the error is added" not in other


@pytest.mark.apart
def test_error_feedback_follows_the_exact_mean(capsys):
    """With SGD what was sent adds up: weights stay within one rounding of exact ones, and drift away without."""

    def last(world, width, own):
        engine = start(
            world, 2, width, own=own, optimizer={"type": "SGD", "params": {"lr": 0.05}}, gradient_clipping=0.0
        )
        for _ in range(12):
            loss = engine(*(part.chunk(world.size)[world.rank] for part in models.batches(1, 4)[0]))
            engine.backward(loss)
            engine.step()
        return models.everything(engine)

    exact, lost, fed = (run_ranks(2, last, *how)[0] for how in ((None, None), ("int4", None), ("int4", FED)))
    names = [name for name in exact if torch.is_tensor(exact[name]) and exact[name].is_floating_point()]

    def distance(state):
        return sum((state[name].double() - exact[name].double()).square().sum().item() for name in names) ** 0.5

    with capsys.disabled():
        print(f"\nint4 after 12 steps of SGD: {distance(lost):.3g} off without feedback, {distance(fed):.3g} with it")
    assert distance(fed) < 0.5 * distance(lost)


def test_error_feedback_without_quantisation_is_named():
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "deeptide": {"quantized_error_feedback": True},
    }
    with pytest.raises(deeptide.ConfigError, match=r"quantized_error_feedback: needs deeptide.quantized_gradients"):
        deeptide.initialize(model=models.make_model(), config=config)
