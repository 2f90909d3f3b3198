# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The tensor axis of a configuration, as initialize reads it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError, World
from deeptide._model.describe import device_of
from deeptide._model.names import namer
from deeptide._process import generators
from deeptide.tensor.cutting.slices import Slice, adding_names, slices_of
from deeptide.tensor.cutting.split import split_model
from deeptide.tensor.mpu import adopt, is_cut, size_of_groups
from deeptide.tensor.positions import has_positions
from deeptide.tensor.team import Team, make_team, team_of


def _section(config: Config, path: str) -> dict[str, Any]:
    section: dict[str, Any] = json.loads(_C.config_section(config, path))
    return section


def size_of(config: Config) -> int:
    """How many ranks share each layer. Errors: ConfigError if two keys say different numbers."""
    ours, theirs = _section(config, "parallel"), _section(config, "tensor_parallel")
    asked = {
        "parallel.tensor": ours["tensor"],
        "tensor_parallel.autotp_size": theirs["autotp_size"],
        "tensor_parallel.tensor_parallel.tp_size": theirs["tensor_parallel"]["tp_size"],
    }
    given = {key: size for key, size in asked.items() if size > 1}
    if len(set(given.values())) > 1:
        raise ConfigError(f"{' and '.join(f'{key} {size}' for key, size in given.items())}: give one of them")
    return next(iter(given.values()), 1)


def prepare(config: Config, model: torch.nn.Module, world: World, stages: int, mpu: object = None) -> Team | None:
    """The team that shares the model's layers, which are cut now if they are not yet. Collective; None without one.

    mpu: whose groups are the teams. A model without slices of its own is cut, if the configuration asks for that.
    """
    size = size_of(config)
    team = team_of(model)
    if mpu is not None:
        _check_groups(mpu, size, world, stages)
        if team is None and (size == 1 or any(map(is_cut, model.parameters()))):  # layers of the model's own
            team = adopt(model, mpu, world, config.runtime.comm_timeout_s, stages)
    _C.check_mesh(world.size, stages, team.size if team else size, _section(config, "parallel")["data"])
    if team is not None:
        _check_team(team, size, world.size, stages)
        if _section(config, "parallel")["sequence_parallel_norms"] and not has_positions(model):
            raise ConfigError(
                "parallel.sequence_parallel_norms is true, and the model's layers were cut without it: give "
                "split_model sequence_parallel_norms=True or layers of their own sequence_parallel=True, and leave the "
                "key out"
            )
        return team
    if size == 1:
        return None
    if stages > 1:  # a plain model's layers were cut before its stages were
        raise ConfigError(
            f"parallel.tensor is {size}, and the {type(model).__name__}'s layers are whole: build them of "
            f"deeptide.tensor's layers with deeptide.tensor.make_team({size}, stages={stages}), or give a plain model "
            "and parallel.pipeline"
        )
    return share_layers(config, model, world)


def _check_groups(mpu: object, size: int, world: World, stages: int) -> None:
    groups = size_of_groups(mpu, world, stages)
    if size not in (1, groups):
        raise ConfigError(
            f"mpu: its model-parallel groups have {groups} ranks, and the configuration asks for {size}; leave "
            "parallel.tensor and tensor_parallel out, or make such groups"
        )


def _check_team(team: Team, size: int, ranks: int, stages: int) -> None:
    if size not in (1, team.size):
        raise ConfigError(
            f"parallel.tensor is {size}, and the model's layers are shared by {team.size} ranks; leave the key out"
        )
    if team.data_size * team.size * stages != ranks:
        raise ConfigError(
            f"the team that shares the model's layers was made for {ranks // team.size // team.data_size} stages, and "
            f"the model has {stages}: deeptide.tensor.make_team({team.size}, stages={stages})"
        )


def share_layers(config: Config, model: torch.nn.Module, world: World | None, stages: int = 1) -> Team:
    """Cuts the layers of a whole model among the ranks of a team of this rank's stage. Collective.

    Errors: ConfigError, before anything is changed but where the check fails.
    """
    device = device_of(model)
    team = make_team(size_of(config), world, config.runtime.comm_timeout_s, stages, device)
    ranks = stages * team.data_size * team.size
    _C.check_mesh(ranks, stages, team.size, _section(config, "parallel")["data"])
    specs = _section(config, "tensor_parallel")["partition_config"]
    ours = _section(config, "parallel")
    by_parts = ours["sequence_parallel_norms"]
    split_model(
        model,
        team,
        specs["layer_specs"],
        specs["use_default_specs"],
        ours["tensor_check"],
        sequence_parallel_norms=by_parts,
    )
    if world is None or world.source != "threads":  # these have one generator, from which others may be drawing
        _draw_alike(team)
    return team


def _draw_alike(team: Team) -> None:
    """Ranks that share layers draw the same random numbers, as for dropout of what they have alike."""
    states = generators.states()
    for state in states:
        team.core.broadcast(state, "start")
    generators.set_states(states)


def cuts_of(model: torch.nn.Module, team: Team) -> dict[str, Callable[[Any], Any]]:
    """By name, what makes a slice's state out of that of the whole parameter; other values pass as they are."""

    def cut(slice_: Slice, value: Any) -> Any:
        is_whole = isinstance(value, torch.Tensor) and value.dim() > slice_.dim % max(1, value.dim())
        return slice_.cut(value, team) if is_whole and value.shape[slice_.dim] == sum(slice_.blocks) else value

    return {name: functools.partial(cut, slice_) for name, slice_ in slices_of(model)}


def options_of(model: torch.nn.Module, team: Team | None) -> dict[str, Any]:
    """The part of it that the core's InitOptions takes."""
    if team is None:
        return {}
    slices = [(name, slice_.dim, list(slice_.blocks)) for name, slice_ in slices_of(model)]
    return {"team": team.core, "slices": slices, "adding": list(map(namer(model), adding_names(model)))}
