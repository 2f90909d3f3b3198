# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Every stage trains as plain torch does, and all stages give the same numbers."""

import functools

import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes, run_ranks

import deeptide

pytestmark = pytest.mark.both_ways

STEPS = 20
MICRO = 2

# Plain torch sums the joined batch in one backward; W ranks sum W parts. Each fp32 sum of n terms may differ by its
# order: about sqrt(n) * 2^-24 relative. Adam divides by sqrt(v) + eps, so near-zero gradients magnify that by 1 / eps:
# hence eps 1e-5, which bounds an error of 1e-9 in a gradient to 1e-6 in a weight a step (lr 1e-2). 20 steps give 2e-5.
FP32_TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def train(world, stage, gas, bf16=False):
    """Trains this rank's part of the global batches; returns losses a step, norms and the final fp32 weights."""
    model = models.make_model()
    cfg = models.config(stage, micro=MICRO, gas=gas, bf16=bf16)
    engine, *_ = deeptide.initialize(model=model, config=cfg, world=world)
    rank, size = (world.rank, world.size) if world else (dist.get_rank(), dist.get_world_size())
    data = models.batches(STEPS, MICRO * gas * size)
    losses, norms = [], []
    for tokens, targets in data:
        total = 0.0
        for micro in range(gas):
            first = (micro * size + rank) * MICRO
            part = slice(first, first + MICRO)
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            outcome = engine.step()
            total += loss.item() / gas
        assert outcome.applied
        losses.append(total)
        norms.append(outcome.grad_norm)
    names = [name for name, _ in model.named_parameters()]
    weights = {name: engine._core.full_state(name, "master") for name in names}
    engine.destroy()
    return losses, norms, weights


@functools.cache
def reference(world, gas):
    """The same on one process with torch's own AdamW on the joined batch."""
    model = models.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    losses, norms = [], []
    for tokens, targets in models.batches(STEPS, MICRO * gas * world):
        loss = model(tokens, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.cache
def trained(world, stage, gas, bf16=False):
    return run_ranks(world, train, stage, gas, bf16)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_and_clipping_do_not_depend_on_the_world_that_shares_a_batch(stage):
    def run(world):
        model = models.make_model()
        engine, *_ = deeptide.initialize(model=model, config=models.config(stage, micro=12 // world.size), world=world)
        ((tokens, targets),) = models.batches(1, 12)
        rows = slice(12 // world.size * world.rank, 12 // world.size * (world.rank + 1))
        engine.backward(100 * engine(tokens[rows], targets[rows]))
        outcome = engine.step()
        engine.destroy()
        return outcome.grad_norm, outcome.clipped_norm

    ((norm, clipped),) = run_ranks(1, run)
    assert norm > 2 and clipped < 1.01  # else nothing was clipped
    for world in (2, 3, 4):
        for other in run_ranks(world, run):
            # The sums of fp32 gradients are in another order: 6e-8 each, which a norm over thousands averages out.
            assert other == pytest.approx((norm, clipped), rel=1e-6)


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_trains_as_plain_torch(stage, world, gas):
    ranks = trained(world, stage, gas)
    expected_losses, expected_norms, expected = reference(world, gas)
    losses = torch.tensor([rank[0] for rank in ranks]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), **FP32_TOLERANCE)
    torch.testing.assert_close(torch.tensor(ranks[0][1]), torch.tensor(expected_norms), rtol=1e-4, atol=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(ranks[0][2][name], weight, msg=lambda text, n=name: f"{n}: {text}", **FP32_TOLERANCE)


def assert_same_bits(one, other):
    for (losses, norms, weights), (losses2, norms2, weights2) in zip(one, other, strict=True):
        assert losses == losses2
        assert norms == norms2
        for name in weights:
            assert torch.equal(weights[name], weights2[name]), name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_stages_are_bit_equal_without_accumulation(world, bf16):
    for stage in (1, 2, 3):
        assert_same_bits(trained(world, 0, 1, bf16), trained(world, stage, 1, bf16))


@pytest.mark.costly
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("pair", [(0, 1), (2, 3)])
def test_pairs_of_stages_are_bit_equal_with_accumulation(pair, world, bf16):
    assert_same_bits(trained(world, pair[0], 3, bf16), trained(world, pair[1], 3, bf16))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bf16_follows_fp32(world):
    """bf16 keeps 8 bits: losses near 3.6 agree to a few 2^-9 relative; a wrong master or a lost update would not."""
    low, full = trained(world, 3, 1, True), trained(world, 3, 1, False)
    torch.testing.assert_close(torch.tensor(low[0][0]), torch.tensor(full[0][0]), rtol=2e-2, atol=2e-2)
    assert low[0][0][-1] < low[0][0][0] - 0.1


def process_main(stage, gas, path):
    deeptide.init_distributed()
    result = train(None, stage, gas)
    if dist.get_rank() == 0:
        torch.save(result, path)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_processes_and_threads_give_the_same_bits(stage, tmp_path):
    path = str(tmp_path / "result.pt")
    run_processes(2, process_main, stage, 1, path)
    assert_same_bits([torch.load(path, weights_only=False)], trained(2, stage, 1)[:1])
