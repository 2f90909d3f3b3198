# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tied or replaced after initialize: saved, exported, loaded and trained as the model has them."""

import edges
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide

pytestmark = pytest.mark.both_ways

EXPORTS = {"stage3_gather_16bit_weights_on_model_save": True}


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def tie(model):
    model.second.weight = model.first.weight


def is_gated(parameter):
    return "DeferredInit" in str(torch._C._dispatch_keys(parameter))


def start(world, stage, **extra):
    return edges.start(world, stage, kind=Twins, zero=EXPORTS, deeptide={"comm_timeout": 20}, **extra)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_late_tie_trains_and_is_saved_and_exported_as_in_torch(stage, tmp_path, capfd):
    safetensors = pytest.importorskip("safetensors.torch")

    def program(world):
        engine = start(world, stage)
        edges.train(engine, rank=world.rank)
        tie(engine.module)
        edges.train(engine, 2, first=1, rank=world.rank)
        state = engine.module_state_dict()
        alone = engine.module_state_dict(only_rank=1)
        assert engine.save_16bit_model(tmp_path, "exported.safetensors")
        engine.save_checkpoint(tmp_path, tag="tied")
        edges.train(engine, first=3, rank=world.rank)
        engine.load_checkpoint(tmp_path, tag="tied")
        assert engine.module.second.weight is engine.module.first.weight
        edges.train(engine, first=3, rank=world.rank)
        later = engine.module_state_dict()
        engine.destroy()
        untied = start(world, stage)
        untied.load_checkpoint(tmp_path, tag="tied")
        return state, alone, later, edges.final_state(untied)

    (state, none, later, untied), (_, alone, _, _) = run_ranks(2, program)
    model, optimizer = edges.plain(kind=Twins)
    for step in range(4):
        if step == 1:
            tie(model)
        if step == 3:
            edges.assert_trained_as(state, model)
            edges.assert_trained_as(untied, model)
        edges.plain_step(model, optimizer, step, ranks=2)
    edges.assert_trained_as(later, model)
    assert torch.equal(state["second.weight"], state["first.weight"])
    assert not none
    for found in (alone, safetensors.load_file(tmp_path / "exported.safetensors")):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
    assert "'second.weight' is 'first.weight' now" in capfd.readouterr().err


@pytest.mark.parametrize("change", ["tie", "replace", "view"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_change_on_one_rank_only_is_told_to_all(stage, change, tmp_path):
    """Who gathered the values of a tie alone would wait for ranks that have none."""

    def program(world):
        engine = start(world, stage)
        edges.train(engine, rank=world.rank)
        engine.save_checkpoint(tmp_path, tag="before")
        first, second = engine.module.first, engine.module.second
        own = second.weight
        if world.rank == 1 and change == "tie":
            tie(engine.module)
        elif world.rank == 1 and change == "replace":
            second.weight = nn.Parameter(torch.zeros(6, 6))
        elif world.rank == 1:
            first.register_buffer("view", first.weight.detach())
        told = {
            "tie": "'second.weight', which is 'first.weight' now",
            "replace": "'second.weight', which is another tensor than at initialize",
            "view": "'first.view', a view of a sharded parameter",
        }[change]
        calls = [
            lambda: engine.save_checkpoint(tmp_path, tag="after"),
            lambda: engine.load_checkpoint(tmp_path, tag="before"),
            lambda: engine.save_16bit_model(tmp_path, "exported.safetensors"),
            lambda: engine.module_state_dict(),
        ]
        # A view of what every rank holds whole is one rank's own buffer, and no matter of the others.
        for call in calls if change != "view" or is_gated(first.weight) else []:
            with pytest.raises(deeptide.ConfigError, match=f"rank 0 has nothing more; rank 1 has.*{told}"):
                call()
        second.weight = own
        if hasattr(first, "view"):
            del first.view
        engine.save_checkpoint(tmp_path, tag="after")
        engine.load_checkpoint(tmp_path, tag="before")
        edges.train(engine, first=1, rank=world.rank)
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_with_two_values_for_a_late_tie_is_refused_by_name(stage, tmp_path):
    def program(world):
        engine = start(world, stage)
        edges.train(engine, rank=world.rank)
        engine.save_checkpoint(tmp_path, tag="untied")
        tie(engine.module)
        edges.train(engine, first=1, rank=world.rank)
        before = engine.module_state_dict()
        text = r"'second\.weight' is 'first\.weight' now.*two values.*nothing was changed"
        with pytest.raises(deeptide.CheckpointError, match=text):
            engine.load_checkpoint(tmp_path, tag="untied")
        after = engine.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        edges.train(engine, first=2, rank=world.rank)
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_fills_a_replaced_parameter_and_leaves_gradients_if_it_fails(stage, tmp_path):
    def program(world):
        engine = start(world, stage)
        edges.train(engine, rank=world.rank)
        engine.save_checkpoint(tmp_path, tag="before")
        saved = engine.module_state_dict()
        engine.module.second.weight = nn.Parameter(torch.full((6, 6), 0.5))
        engine.load_checkpoint(tmp_path, tag="before")
        loaded = engine.module_state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        engine.module.more = nn.Linear(2, 2)
        loss = engine(edges.inputs(world.rank, 1)).square().mean()
        parameters = [engine.module.first.weight, engine.module.head.weight]
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        with pytest.raises(deeptide.CheckpointError, match=r"(?s)nothing was changed.*'more\.weight/buffer"):
            engine.load_checkpoint(tmp_path, tag="before")
        assert all(p.grad is not None for p in parameters)
        assert engine.step().applied
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_replaced_late_loads_into_one_that_is_bound(stage, tmp_path):
    """Untied after initialize and saved; the next program unties before."""

    def tied():
        model = models.make_model(kind=Twins)
        tie(model)
        return model

    def program(world):
        engine = edges.start(world, stage, model=tied())
        edges.train(engine, rank=world.rank)
        engine.module.second.weight = nn.Parameter(torch.full((6, 6), 0.25))
        engine.save_checkpoint(tmp_path, tag="untied")
        engine.destroy()
        fresh = start(world, stage)
        fresh.load_checkpoint(tmp_path, tag="untied", load_module_only=True)
        return edges.final_state(fresh)

    for state in run_ranks(2, program):
        assert torch.equal(state["second.weight"], torch.full((6, 6), 0.25))
        assert not torch.equal(state["first.weight"], state["second.weight"])
