# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of the tests, cut among ranks by their configuration, beside the same models whole."""

import models
import torch

import deeptide
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of

MICRO, STEPS = 2, 3

# TinyModel's layers have names of their own; its head's weight is the embedding's, of an odd vocabulary.
SPECS = [
    {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
    {"patterns": [r"head\.weight"], "partition_type": "column", "gather_output": True},
]


def config(stage, tensor, gas=1, specs=SPECS, **more):
    settings = models.config(stage, gas=gas, micro=MICRO, **more)
    if tensor > 1:
        settings["parallel"] = {"tensor": tensor}
        settings["tensor_parallel"] = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
    return settings


def batch_rank(engine):
    """(number, count) of the ranks that train on other batches."""
    team = team_of(engine.module)
    return (team.data_rank, team.data_size) if team else (engine.world.rank, engine.world.size)


def steps(engine, count, gas=1, begin=0):
    """(losses, norms) of optimizer steps `begin` to `begin + count`, of batches that the data rank has."""
    rank, ranks = batch_rank(engine)
    rows = models.batches((begin + count) * gas, MICRO * ranks)[begin * gas :]
    losses, norms = [], []
    for number, (tokens, targets) in enumerate(rows):
        mine = slice(rank * MICRO, (rank + 1) * MICRO)
        loss = engine(tokens[mine], targets[mine])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if (number + 1) % gas == 0:
            norms.append(engine.get_global_grad_norm())
    return losses, norms


def start(world, settings, kind=models.TinyModel, seed=0, make=None):
    """`make`: an optimizer of parameters, in the place of the configuration's."""
    model = models.make_model(seed=seed, kind=kind)
    optimizer = make(model.parameters()) if make else None
    return deeptide.initialize(model=model, optimizer=optimizer, config=settings, world=world)[0]


def train(world, settings, gas=1):
    """(losses, norms, whole weights)."""
    engine = start(world, settings)
    losses, norms = steps(engine, STEPS, gas)
    return losses, norms, engine.module_state_dict()


def moved(name, before, after):
    """How far training has moved a weight."""
    return after[name].float() - before[name].float()


def whole(engine, role):
    """{name: state} of all parameters, slices joined. Collective."""
    team, cuts = team_of(engine.module), dict(slices_of(engine.module))
    states = {}
    for name, _ in engine.module.named_parameters():
        value = engine._core.full_state(name, role)
        if value is None:  # it is frozen
            continue
        states[name] = cuts[name].join(team.core.all_gather(value, "checkpoint")) if name in cuts else value
    return states


def whole_states():
    return {name: value.clone() for name, value in models.make_model().state_dict().items()}


def near(one, other, share, what, floor=0.0):
    """Within a share of the largest element, or of `floor`, below which values are rounding errors."""
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    most = (one - other).abs().max().item()
    assert most <= share * max(floor, other.abs().max().item()), (what, most, other.abs().max().item())
