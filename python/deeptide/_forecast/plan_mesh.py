# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a job with more axes than data: one plan per pipeline stage, of what a rank of it holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from deeptide import _C, zero
from deeptide._C import Config, ConfigError
from deeptide._model.describe import describe, parameter_names
from deeptide._model.names import namer
from deeptide._optimizers.groups import OptimizerSource, ParametersSource, plan_optimizer
from deeptide.pipeline.cutting.along import find_cut
from deeptide.pipeline.cutting.blocks import numbered_blocks, stages_of, uses_of_parameters
from deeptide.pipeline.cutting.chunks import chunks_of, starts_of
from deeptide.tensor.axis import size_of
from deeptide.tensor.cutting.slices import Slice
from deeptide.tensor.cutting.split import check_plan, plan_for, slices_of_plan


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many ranks each axis has. Rank = (stage * data + data rank) * tensor + tensor rank."""

    pipeline: int
    data: int
    tensor: int

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole job."""
        return self.pipeline * self.data * self.tensor

    def stages_on_hosts(self, ranks_per_host: int) -> Iterator[dict[int, int]]:
        """For each host {stage: its ranks there}."""
        of_stage = self.data * self.tensor
        for first in range(0, self.num_ranks, ranks_per_host):
            ranks = range(first, first + ranks_per_host)
            yield {stage: len(list(own)) for stage, own in itertools.groupby(ranks, lambda rank: rank // of_stage)}

    def of_stage_per_host(self, ranks_per_host: int) -> int:
        """The ranks of one stage that are on one host."""
        return min(self.data * self.tensor, ranks_per_host)

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"


def mesh_of(config: Config, world_size: int) -> Mesh:
    """The mesh that `initialize` makes of a configuration. Errors: ConfigError if the ranks do not divide."""
    section: dict[str, Any] = json.loads(_C.config_section(config, "parallel"))
    stages, tensor = section["pipeline"]["stages"] or 1, size_of(config)
    _C.check_mesh(world_size, stages, tensor, section["data"])
    return Mesh(stages, world_size // (stages * tensor), tensor)


def _slices(model: nn.Module, config: Config, size: int) -> dict[int, Slice]:
    """{id of a parameter: how it is cut among `size` ranks}; nothing is cut. Errors: ConfigError, as the start's."""
    if size == 1:
        return {}
    specs = json.loads(_C.config_section(config, "tensor_parallel"))["partition_config"]
    cuts, _ = plan_for(model, specs["layer_specs"], specs["use_default_specs"])
    check_plan(model, cuts, size)
    return slices_of_plan(model, cuts)


def bounds_of(
    model: nn.Module, num_stages: int, num_chunks: int, starts: list[str] | None = None
) -> tuple[list[str], list[int]]:
    """(the names of the blocks that a cut goes along, bounds of the parts). One part has all numbered blocks."""
    if num_stages == 1:
        names = list(numbered_blocks(model))
        return names, [0, len(names)]
    along = find_cut(model, num_stages, num_chunks, starts)
    return along.chain.names, along.bounds


def owners_of(model: nn.Module, config: Config, num_stages: int) -> dict[int, list[int]]:
    """{id of a parameter: the stages that use it}; the first owns it, and lends it to the others."""
    if num_stages == 1:
        return {id(parameter): [0] for parameter in model.parameters()}
    along = find_cut(model, num_stages, chunks_of(config), starts_of(config))
    return uses_of_parameters(model, stages_of(along.uses, num_stages))


class Part(NamedTuple):
    """The part of a model that one stage's ranks hold, as the core is told of it."""

    description: _C.ModelDescription
    names: set[str]
    slices: list[tuple[str, int, list[int]]]


class Parts:
    """The parts of a model under one number of stages, of chunks and of tensor ranks, however many data ranks."""

    def __init__(self, model: nn.Module, config: Config, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._users = owners_of(model, config, mesh.pipeline)
        self._slices = _slices(model, config, mesh.tensor)
        self._held: dict[int, torch.Tensor] = {}
        self._parts: dict[int, Part] = {}

    def of_stage(self, stage: int) -> Part:
        """The part of a stage, read from the model once."""
        if stage not in self._parts:
            description = describe(self._model, functools.partial(self._held_by, stage))
            parameters = self._model.named_parameters(remove_duplicate=False)
            plain = namer(self._model)
            names = {plain(name) for name, parameter in parameters if self._users[id(parameter)][0] == stage}
            self._parts[stage] = Part(description, names, self._slices_of(names))
        return self._parts[stage]

    def _held_by(self, stage: int, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """For `describe`: the tensor that a rank of a stage has in the place of the model's; None: none."""
        return self._slice(tensor) if self._users[id(tensor)][0] == stage else None

    def _slices_of(self, names: set[str]) -> list[tuple[str, int, list[int]]]:
        """(name, dimension, blocks in the whole) of those parameters that are slices."""
        found = []
        plain = namer(self._model)
        for given, parameter in self._model.named_parameters(remove_duplicate=False):
            name = plain(given)
            cut = self._slices.get(id(parameter))
            if cut is not None and name in names:
                found.append((name, cut.dim, list(cut.blocks)))
        return found

    def lent_numel(self, stage: int) -> int:
        """Elements that a stage uses and another one owns."""
        return sum(
            self._slice(parameter).numel()
            for parameter in self._model.parameters()
            if stage in self._users[id(parameter)][1:]
        )

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter of the size that each rank of a tensor team has, without values. One for all of its names."""
        cut = self._slices.get(id(tensor))
        if cut is None:
            return tensor
        if id(tensor) not in self._held:
            shape = list(tensor.shape)
            shape[cut.dim] = sum(-(-block // self._mesh.tensor) for block in cut.blocks)
            with zero.Init():
                part = torch.empty(shape, dtype=tensor.dtype)
            self._held[id(tensor)] = nn.Parameter(part, tensor.requires_grad)
        return self._held[id(tensor)]


def plans_of_stages(
    model: nn.Module,
    config: Config,
    mesh: Mesh,
    ranks_per_host: int,
    parts: Parts,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
    alike: Sequence[int] | None = None,
) -> list[_C.MemoryPlan]:
    """Each stage's plan of one of its ranks.

    parts: of the same mesh, whatever its data ranks. alike: for each stage the first one that holds as much, whose plan
    it gets. Errors: ConfigError, as initialize raises where it follows from model and configuration.
    """
    chosen = plan_optimizer(model, parameter_names(model), config, optimizer, model_parameters)
    if chosen is not None and chosen.custom is not None:
        raise ConfigError("plan: an optimizer of the program's own has no plan under parallel.pipeline or tensor")
    groups = chosen.core_groups(config) if chosen is not None else []
    override = chosen.override if chosen is not None else ""
    ranks, on_host = mesh.data * mesh.tensor, mesh.of_stage_per_host(ranks_per_host)
    plans: list[_C.MemoryPlan] = []
    for stage in range(mesh.pipeline):
        if alike is not None and alike[stage] < stage:
            plans.append(plans[alike[stage]])
            continue
        part = parts.of_stage(stage)
        own = [([name for name in group.parameters if name in part.names], group.hyperparameters) for group in groups]
        filled = [_C.ParameterGroup(mine, values) for mine, values in own if mine]
        trains = override if filled else ""  # else the stage is frozen
        options = _C.InitOptions(None, filled, trains)
        is_stage = mesh.pipeline > 1
        plans.append(_C.plan(part.description, config, options, ranks, on_host, is_stage, mesh.tensor, part.slices))
    return plans
