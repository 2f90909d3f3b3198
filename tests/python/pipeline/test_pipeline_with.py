# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines go with optimizers, files, frozen layers, recomputation, long headers, a rank that is killed."""

import json
import os
import signal

import pytest
import stages
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide.pipeline import LayerSpec, PipelineModule

STEPS, GAS = 3, 2

OPTIMIZERS = {
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "own": None,
}


def with_optimizer(world, num_stages, settings, more):
    layers = stages.layers()
    model = PipelineModule(layers, num_stages, loss_fn=stages.loss_of, world=world) if num_stages else stages.Uncut()
    given = {} if settings.get("optimizer") else {"optimizer": lambda groups: torch.optim.NAdam(groups, lr=1e-2)}
    engine = deeptide.initialize(model=model, config=settings, world=world, **given)[0]
    data_size = world.size // max(num_stages, 1)
    batches = stages.batches(world.rank % data_size, data_size, STEPS, GAS)
    loss_fn = {} if num_stages else {"loss_fn": stages.loss_of}
    losses = [engine.train_batch(batches, **loss_fn).item() for _ in range(STEPS)]
    return losses, {name: engine._core.full_state(name, "master") for name, _ in model.named_parameters()}


def compare(settings, exact=True):
    cut = run_ranks(4, with_optimizer, 2, settings, {})
    uncut = run_ranks(2, with_optimizer, 0, settings, {})
    names = set()
    for losses, weights in cut:
        assert losses == pytest.approx(uncut[0][0], rel=0 if exact else 1e-4)
        names |= weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, uncut[0][1][name], rtol=0 if exact else 1e-3, atol=0 if exact else 1e-5, msg=name
            )
    assert names == uncut[0][1].keys()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("stage", [0, 2])
def test_every_optimizer_steps_a_stage(name, stage):
    """Norms of whole parameters are sums over shards, which the cut moves: those rules differ in the last bits."""
    settings = stages.config(stage, GAS, gradient_clipping=0.0, optimizer=OPTIMIZERS[name])
    if settings["optimizer"] is None:
        del settings["optimizer"]
    compare(settings, exact=name in ("lion", "own"))


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_a_stage_lie_in_files(stage, tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    compare(stages.config(stage, GAS, gradient_clipping=0.0, zero=offload))


def frozen(world, num_stages):
    """Adapters on the first stage, all of the last one frozen but its head."""
    layers = stages.layers()
    model = PipelineModule(layers, num_stages, loss_fn=stages.loss_of, world=world) if num_stages else stages.Uncut()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("7.weight", "2.up.weight", "2.down.bias"))
    engine = deeptide.initialize(model=model, config=stages.config(3, GAS, gradient_clipping=0.0), world=world)[0]
    data_size = world.size // max(num_stages, 1)
    batches = stages.batches(world.rank % data_size, data_size, STEPS, GAS)
    return [
        engine.train_batch(batches, **({} if num_stages else {"loss_fn": stages.loss_of})).item() for _ in range(STEPS)
    ]


def test_frozen_layers_hand_gradients_on():
    cut, uncut = run_ranks(4, frozen, 2), run_ranks(2, frozen, 0)
    assert all(losses == uncut[0] for losses in cut) and cut[0][2] != cut[0][0]


def recomputed(world, interval, by_section=False):
    model = PipelineModule(
        stages.layers(),
        2,
        loss_fn=stages.loss_of,
        activation_checkpoint_interval=0 if by_section else interval,
        world=world,
    )
    section = {"pipeline": {"activation_checkpoint_interval": interval}} if by_section else {}
    engine = deeptide.initialize(model=model, config=stages.config(3, GAS, **section), world=world)[0]
    assert engine.module.activation_checkpoint_interval == interval
    if by_section:
        engine.module.set_checkpoint_interval(1)  # the program's last word
    found = stages.train(engine, stages.batches(engine.data_parallel_rank, 2, STEPS, GAS), STEPS)
    assert not by_section or engine.module.activation_checkpoint_interval == 1
    return found


@pytest.mark.both_ways
@pytest.mark.parametrize("by_section", [False, True])
def test_recomputed_layers_change_no_number(by_section):
    for (losses, norms, states), (losses0, norms0, states0) in zip(
        run_ranks(4, recomputed, 2, by_section), run_ranks(4, recomputed, 0), strict=True
    ):
        assert losses == losses0 and norms == norms0
        assert all(torch.equal(states[name], value) for name, value in states0.items())


class Spreads(torch.nn.Module):
    """Hands on more than a header of one kibibyte tells of: with, and every third time without, one more tensor."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        parts = {f"a part of a long name, number {i}": [x * self.weight * i, None, ("text", i)] for i in range(40)}
        parts["empty"] = torch.empty(0, 3)
        return parts if self.calls % 3 else {**parts, "more": x.double()}


class Joins(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, parts):
        assert parts.pop("empty").shape == (0, 3)
        more = parts.pop("more", torch.zeros(1)).float().sum()
        assert all(value[1] is None and value[2][1] == i for i, value in enumerate(parts.values()))
        return (sum(value[0] for value in parts.values()) * self.weight).square().mean() * 1e-4 + more * 1e-3


def spread(world, num_stages):
    model = PipelineModule([LayerSpec(Spreads), LayerSpec(Joins)], num_stages, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(0, 4, gradient_clipping=0.0), world=world)[0]
    data = ((torch.full((2, 3), 1.0 + i), None) for i in range(12))
    return [engine.train_batch(data).item() for _ in range(3)]


def test_activations_of_any_nesting_and_number_travel():
    whole = run_ranks(1, spread, 1)[0]
    assert run_ranks(2, spread, 2) == [whole, whole]


class Odd(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        self.weight, self.made = torch.nn.Parameter(torch.ones(3)), made

    def forward(self, x):
        return self.made(x * self.weight)


def hand_on(world, made, text):
    settings = stages.config(0, 1, deeptide={"error_grace": 0.2})
    model = PipelineModule([Odd(made), Joins()], 2, world=world)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    with pytest.raises(TypeError if world.rank == 0 else deeptide.CommError, match=text):
        engine.train_batch(iter([(torch.ones(2, 3), None)]))


@pytest.mark.parametrize(
    ("made", "text"),
    [(lambda x: {x}, "a stage hands on set"), (lambda x: x.to_sparse(), "a tensor of layout torch.sparse_coo")],
)
def test_what_no_header_tells_of_is_refused(made, text):
    run_ranks(2, hand_on, made, text)


def lose_a_rank(victim):
    world_rank = int(os.environ["RANK"])
    model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of)
    engine = deeptide.initialize(model=model, config=stages.config(3, GAS))[0]
    given = stages.batches(engine.data_parallel_rank, 2, 4, GAS)
    engine.train_batch(given)
    if world_rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        engine.train_batch(given)
    except deeptide.CommError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(3)


@pytest.mark.parametrize("victim", [1, 2])
def test_all_stages_hear_of_a_rank_that_was_killed(victim):
    done = run_processes(4, lose_a_rank, victim, check=False)
    assert [process.returncode for process in done] == [-9 if rank == victim else 3 for rank in range(4)]
    texts = [json.loads(process.stdout.splitlines()[-1]) for rank, process in enumerate(done) if rank != victim]
    assert any(f"rank {victim}" in text for text in texts), texts
