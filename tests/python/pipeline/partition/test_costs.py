# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""partition_method "profile" and "memory" cut as well as any cut does, on all ranks alike."""

import itertools
import random
import time

import pytest
import stages
import torch
from conftest import run_ranks
from torch.nn import Linear

import deeptide
from deeptide import _C, ConfigError
from deeptide.pipeline import LayerSpec, PipelineModule, PipelineSchedule, TiedLayerSpec, simulate
from deeptide.pipeline.costs import bounds_by_memory, bytes_of_layers, seconds_of_layers


def largest(cost, bounds):
    return max(cost(part, begin, end) for part, (begin, end) in enumerate(itertools.pairwise(bounds)))


def best(cost, num_items, num_parts):
    """The least over all cuts."""
    inner = itertools.combinations(range(1, num_items), num_parts - 1)
    return min(largest(cost, [0, *cuts, num_items]) for cuts in inner)


def by_memory(states, kept, num_stages, chunks):
    """A part's bytes, with as many micro-batches as its stage has alive."""
    schedule = PipelineSchedule.one_f_one_b if chunks == 1 else PipelineSchedule.interleaved
    peaks = simulate(schedule, num_stages, 4 * num_stages, chunks).peak_activations
    return lambda part, begin, end: sum(states[begin:end]) + peaks[part % num_stages] / chunks * sum(kept[begin:end])


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
def test_the_costliest_part_costs_as_little_as_in_any_cut(num_parts):
    draws = random.Random(num_parts)
    for _ in range(30):
        num_items = draws.randint(num_parts, 9)
        weights, kept = ([draws.choice([0, 1, 5, draws.randint(0, 9)]) for _ in range(num_items)] for _ in range(2))
        by_time = lambda part, begin, end, weights=weights: sum(weights[begin:end])  # noqa: E731
        cuts = [(by_time, _C.bounds_by_time(weights, num_parts))]
        for chunks in (1, 2) if num_parts % 2 == 0 else (1,):
            given = weights, kept, num_parts // chunks, chunks
            cuts.append((by_memory(*given), _C.bounds_by_memory(*given)))
        for cost, bounds in cuts:
            assert len(bounds) == num_parts + 1 and all(a < b for a, b in itertools.pairwise(bounds))
            assert largest(cost, bounds) == best(cost, num_items, num_parts)


class Sleeps(torch.nn.Module):
    """Sleeps as long as asked in forward, and again in backward."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds, self.calls = torch.nn.Parameter(torch.ones(3)), seconds, 0

    def forward(self, x):
        self.calls += 1
        time.sleep(self.seconds)
        return Late.apply(x * self.weight, self.seconds)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def test_a_layer_takes_its_forward_and_its_backward():
    slow = Sleeps(0.05)
    torch.manual_seed(1)
    found = seconds_of_layers([torch.tanh, slow, LayerSpec(Linear, 3, 3), torch.nn.Dropout()], torch.ones(2, 3))
    assert found[1] >= 0.1 > max(found[0], found[2])
    assert slow.calls == 0 and slow.weight.grad is None  # a copy ran
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


def by_time(world):
    """On rank 0 the last layer is slow, on the others the first."""
    slow = 6 if world.rank == 0 else 0
    layers = [Sleeps(0.05 if number == slow else 0.0) for number in range(7)]
    found = []
    for _ in range(2):
        model = PipelineModule(layers, 2, partition_method="profile", profile_input=torch.ones(2, 3), world=world)
        found.append(model.parts)
    return found


def test_all_ranks_take_the_times_of_rank_0():
    assert run_ranks(4, by_time) == [[[0, 6, 7]] * 2] * 4


def test_a_layers_bytes_are_those_of_its_states_and_of_what_backward_keeps():
    layers = [
        TiedLayerSpec("embedding", stages.Embedding),
        lambda given: given["hidden"],
        Linear(12, 6).requires_grad_(False),
        torch.tanh,
        LayerSpec(Linear, 6, 12, bias=False),
        TiedLayerSpec("embedding", stages.Embedding, forward_fn=lambda e, x: stages.tied_logits(e, {"hidden": x})),
    ]
    states, kept = bytes_of_layers(layers, torch.zeros(5, 7, dtype=torch.long))
    rows = 5 * 7
    assert states == [20 * 19 * 12, 0, 4 * (12 * 6 + 6), 0, 20 * 6 * 12, 0]
    # The tokens; nothing but its weight for a frozen layer; tanh's output, which the next layer keeps too; its input.
    assert kept == [8 * rows, 0, 0, 4 * rows * 6, 0, 4 * rows * 12]


def test_memory_counts_the_micro_batches_that_a_stage_has_alive():
    layers = [LayerSpec(torch.nn.Linear, 8, 8), *[torch.nn.Tanh() for _ in range(8)]]
    sample = torch.zeros(64, 8)
    for num_stages, chunks in ((2, 1), (3, 1), (4, 1), (2, 2)):
        states, kept = bytes_of_layers(layers, sample)
        cost = by_memory(states, kept, num_stages, chunks)
        if chunks == 1:
            assert cost(0, 0, 2) == sum(states[:2]) + num_stages * sum(kept[:2])
            assert cost(num_stages - 1, 3, 5) == sum(kept[3:5])
        bounds = bounds_by_memory(layers, sample, num_stages, chunks)
        assert largest(cost, bounds) == best(cost, len(layers), num_stages * chunks)
        model = PipelineModule(layers, 1, partition_method="memory", profile_input=sample)
        assert model.parts == [0, len(layers)]


def train(world, method, num_stages):
    given = {"partition_method": method, "profile_input": torch.zeros(2, 5, dtype=torch.long)}
    model = PipelineModule(stages.layers(), num_stages, loss_fn=stages.loss_of, world=world, **given)
    engine = deeptide.initialize(model=model, config=stages.config(1, 2), world=world)[0]
    return model.parts, stages.train(engine, stages.batches(0, 1, 3, 2), 3)[0]


@pytest.mark.parametrize("method", ["profile", "memory", "Memory"])
def test_a_model_that_is_cut_so_trains(method):
    found = run_ranks(3, train, method, 3)
    assert len({tuple(parts) for parts, _ in found}) == 1
    assert all(losses == found[0][1] for _, losses in found)
    assert found[0][1] == pytest.approx(run_ranks(1, train, "uniform", 1)[0][1], rel=1e-6)


def fail(world, method):
    with pytest.raises(ConfigError, match=rf"partition_method '{method}': layer 1 \(Linear\) fails on profile_input"):
        PipelineModule(
            [Linear(2, 2), Linear(3, 3)], 2, partition_method=method, profile_input=torch.ones(1, 2), world=world
        )


@pytest.mark.parametrize("method", ["profile", "memory"])
def test_a_layer_that_fails_is_named_on_all_ranks(method):
    run_ranks(2, fail, method)
