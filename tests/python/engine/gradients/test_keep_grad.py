# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`keep_grad`: scripts that read or change .grad between backward and step train as on plain torch."""

import models
import pytest
import torch
from conftest import run_ranks
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import deeptide

pytestmark = pytest.mark.both_ways

STEPS = 4
# Sums in another order, and Adam's division: an element whose gradient is hardly more than rounding moves elsewhere, by
# a hundredth of the rate, 1e-2. How far depends on the processor's matrix products.
CLOSE = {"rtol": 2e-5, "atol": 1e-4}


def start(world, stage, keep=True, gas=1, bf16=False, **extra):
    config = models.config(stage, gas=gas, bf16=bf16, deeptide={"keep_grad": keep}, **extra)
    model = models.make_model()
    engine, optimizer, *_ = deeptide.initialize(model=model, config=config, world=world)
    return engine, optimizer


def parts(engine, gas=1, steps=STEPS):
    """By step: this rank's micro-batches of the global batches."""
    rank, size = engine.world.rank, engine.world.size
    for tokens, targets in models.batches(steps, 2 * gas * size):
        firsts = [(micro * size + rank) * 2 for micro in range(gas)]
        yield [(tokens[first : first + 2], targets[first : first + 2]) for first in firsts]


def weights_of(engine):
    names = [name for name, _ in engine.module.named_parameters()]
    return {name: engine._core.full_state(name, "master") for name in names}


def plain_steps(world, change, gas=1):
    """Plain torch on the joined batch; `change(model)` between backward and step. Returns gradients and weights."""
    model = models.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    shown = []
    for tokens, targets in models.batches(STEPS, 2 * gas * world):
        model(tokens, targets).backward()
        shown.append({name: p.grad.clone() for name, p in model.named_parameters()})
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    return shown, {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_steps(world, stage, change, gas=1, own_backward=False):
    engine, optimizer = start(world, stage, gas=gas, gradient_clipping=0.0)
    shown = []
    for micros in parts(engine, gas):
        for number, (tokens, targets) in enumerate(micros):
            loss = engine(tokens, targets)
            if own_backward:
                loss.backward()
            else:
                engine.backward(loss)
            if number + 1 < gas:
                assert all(p.grad is None for p in engine.module.parameters())
                engine.step()
        shown.append({name: p.grad.clone() for name, p in engine.module.named_parameters()})
        change(engine.module)
        optimizer.step()
        assert all(p.grad is None for p in engine.module.parameters())
    return shown, weights_of(engine)


def leave(model):
    pass


def clip(model):
    clip_grad_norm_(model.parameters(), 0.05)


def replace(model):
    """A new tensor, a change in place, one dropped, one zeroed."""
    model.head.weight.grad = model.head.weight.grad * 0.5
    model.h[0].up.weight.grad.add_(0.01)
    model.norm.weight.grad = None
    model.h[1].down.bias.grad.zero_()
    model.h[2].up.bias.grad.data.mul_(2.0)  # moves no version counter


@pytest.mark.parametrize("change", [leave, clip, replace])
@pytest.mark.parametrize(("world", "gas"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_trains_as_plain_torch(stage, world, gas, change):
    expected_shown, expected = plain_steps(world, change, gas)
    for shown, weights in run_ranks(world, engine_steps, stage, change, gas, gas == 1 and change is clip):
        for step in range(STEPS):
            for name, gradient in expected_shown[step].items():
                torch.testing.assert_close(shown[step][name], gradient, rtol=1e-3, atol=2e-5)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, **CLOSE)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_nobody_changes_leaves_the_bits_alone(stage, bf16):
    def run(world, keep):
        engine, _ = start(world, stage, keep=keep, gas=2, bf16=bf16)
        for micros in parts(engine, 2):
            for tokens, targets in micros:
                engine.backward(engine(tokens, targets))
                outcome = engine.step()
        return outcome.grad_norm, weights_of(engine)

    kept, usual = run_ranks(2, run, True), run_ranks(2, run, False)
    for (norm, weights), (expected_norm, expected) in zip(kept, usual, strict=True):
        assert norm == expected_norm
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_several_losses_add_up_after_a_change():
    """A change between two backward passes stays, as in torch, also where a rank reaches other parameters."""

    def plain(halves):
        model = models.make_model()
        for half, (tokens, targets) in enumerate(halves):
            model(tokens, targets).backward()
            if half == 0:
                for p in model.parameters():
                    p.grad.mul_(3.0)
        return {name: p.grad for name, p in model.named_parameters()}

    def run(world):
        engine, _ = start(world, 1)
        tokens, targets = models.batches(1, 2)[0]
        halves = [(tokens[:1], targets[:1]), (tokens[1:], targets[1:])]
        for half, (one, target) in enumerate(halves):
            engine.backward(engine(one, target))
            if half == 0:
                for p in engine.module.parameters():
                    p.grad.mul_(3.0)
        expected = plain(halves)
        for name, p in engine.module.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
            whole = deeptide.utils.safe_get_full_grad(p)
            torch.testing.assert_close(whole, p.grad, rtol=1e-6, atol=1e-7)
        assert engine.step()

    run_ranks(2, run)


def test_zero_grad_of_the_model_drops_the_step():
    def run(world):
        engine, optimizer = start(world, 1)
        for number, [(tokens, targets)] in enumerate(parts(engine)):
            before = weights_of(engine)
            engine.backward(engine(tokens, targets))
            if number == 2:
                engine.module.zero_grad()
            optimizer.step()
            moved = any(not torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
            assert moved == (number != 2)

    run_ranks(2, run)


def test_the_engines_zero_grad_drops_what_is_shown():
    def run(world):
        engine, optimizer = start(world, 2)
        (first,), (second,) = list(parts(engine))[:2]
        engine.backward(engine(*first))
        optimizer.zero_grad()
        assert all(p.grad is None for p in engine.module.parameters())
        engine.backward(engine(*second))
        fresh, _ = start(world, 2)
        fresh.backward(fresh(*second))
        for own, other in zip(engine.module.parameters(), fresh.module.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)

    run_ranks(2, run)


def test_ranks_that_change_different_gradients_get_one_error():
    def run(world):
        engine, _ = start(world, 1)
        (first,), (second,) = list(parts(engine))[:2]
        engine.backward(engine(*first))
        if world.rank == 1:
            engine.module.norm.bias.grad.mul_(2.0)
        with pytest.raises(ValueError, match=r"'norm.bias' was left alone on rank 0 and changed on rank 1"):
            engine.step()
        engine.zero_grad()
        engine.backward(engine(*second))
        assert engine.step()

    run_ranks(2, run)


def test_a_joined_rank_shows_gradients_too():
    def run(world):
        engine, _ = start(world, 1)
        for number, [micro] in enumerate(parts(engine)):
            if world.rank == 1 and number == 2:
                engine.join()
                return
            engine.backward(engine(*micro))
            assert engine.module.norm.bias.grad.abs().sum() > 0
            assert engine.step()
        engine.join()

    run_ranks(2, run)


def test_a_parameter_that_only_one_rank_reached_shows_its_mean():
    def run(world):
        engine, _ = start(world, 2)
        [(tokens, _)] = next(parts(engine))
        model = engine.module
        x = model.embed(tokens)
        loss = model.head(model.h[0](x) if world.rank == 0 else x).square().mean()
        engine.backward(loss)
        gradient = model.h[0].up.weight.grad
        assert gradient.abs().sum() > 0
        assert model.h[1].up.weight.grad is None
        assert engine.step()
        return gradient.clone()

    one, other = run_ranks(2, run)
    assert torch.equal(one, other)


class Checkpointed(models.TinyModel):
    """Reentrant: each block's backward runs inside the backward."""

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=True)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("own_backward", [False, True])
def test_reentrant_checkpointing(own_backward):
    # Here, not in the ranks: checkpointing sets the generator that all threads share, and would change a model in the
    # making.
    plain = models.make_model()
    ((tokens, targets),) = models.batches(1, 4)
    plain(tokens, targets).backward()

    def run(world):
        config = models.config(1, deeptide={"keep_grad": True})
        engine, *_ = deeptide.initialize(model=models.make_model(kind=Checkpointed), config=config, world=world)
        part = slice(2 * world.rank, 2 * world.rank + 2)
        loss = engine(tokens[part], targets[part])
        if own_backward:
            loss.backward()
        else:
            engine.backward(loss)
        for (name, p), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
        assert engine.step()

    run_ranks(2, run)


def test_torchs_grad_scaler():
    """It unscales .grad in place and skips the step when something is not finite."""

    def run(world):
        engine, optimizer = start(world, 1, gradient_clipping=0.0)
        expected, _ = start(world, 1, gradient_clipping=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, [(tokens, targets)] in enumerate(parts(engine)):
            loss = engine(tokens, targets) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if number != 1:
                expected.backward(expected(tokens, targets))
                assert expected.step()
        assert engine.global_steps == STEPS - 1
        assert scaler.get_scale() == 512.0
        for name, weight in weights_of(engine).items():
            torch.testing.assert_close(weight, expected._core.full_state(name, "master"), **CLOSE)

    run_ranks(2, run)


def test_fp16_shows_gradients_without_the_loss_scale():
    def run(world):
        fp16 = {"enabled": True, "loss_scale": 1024}
        engine, _ = start(world, 1, fp16=fp16, bf16=False)
        plain = models.make_model()
        tokens, targets = models.batches(1, 4)[0]
        plain(tokens, targets).backward()
        part = slice(2 * world.rank, 2 * world.rank + 2)
        engine.backward(engine(tokens[part], targets[part]))
        for p, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == torch.float16
            torch.testing.assert_close(p.grad.float(), expected.grad, rtol=5e-2, atol=2e-3)
        clip_grad_norm_(engine.module.parameters(), 1e-3)
        outcome = engine.step()
        assert outcome
        assert outcome.grad_norm == pytest.approx(1e-3, rel=2e-2)

    run_ranks(2, run)


def test_the_memory_is_in_the_forecast():
    def run(world, keep):
        engine, _ = start(world, 2, keep=keep, bf16=False)
        [(tokens, targets)] = next(parts(engine))
        engine.backward(engine(tokens, targets))
        engine.step()
        line = next(line for line in engine._core.memory() if line.role == "gradients")
        assert line.measured_bytes <= line.predicted_bytes
        return line.predicted_bytes

    numel = sum(p.numel() for p in models.make_model().parameters())
    for kept, without in zip(run_ranks(2, run, True), run_ranks(2, run, False), strict=True):
        assert kept - without >= 4 * numel


def test_stage_3_is_refused_by_name():
    def run(world):
        with pytest.raises(ValueError, match=r"deeptide.keep_grad .* stage 3 .* safe_get_full_grad"):
            start(world, 3)

    run_ranks(1, run)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_counts_what_making_gradients_whole_has_sent(stage):
    def sent(world, keep):
        engine, _ = start(world, stage, keep=keep)
        for [(tokens, targets)] in parts(engine, steps=2):
            engine.backward(engine(tokens, targets))
            outcome = engine.step()
        return outcome.sent_bytes, sum(p.numel() for p in engine.module.parameters())

    (kept, numel), (plain, _) = (run_ranks(2, sent, keep)[0] for keep in (True, False))
    half = 4 * numel / 2  # of the gradients: the other rank's part
    assert half <= kept - plain <= 1.1 * half, "units are padded a little"
