# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models that bring layers of their own, as Megatron's, and an object that knows their groups."""

from __future__ import annotations

import re
from typing import Any

import torch

from deeptide._C import ConfigError, World, stage_of_rank
from deeptide.tensor.cutting.slices import Slice
from deeptide.tensor.team import Team, make_team


class OfTopology:
    """Answers of a rank's place on a grid: what DeepSpeed asks where a PipelineModule has a topology, and no mpu."""

    def __init__(self, topology: Any, rank: int) -> None:
        self._sizes = {axis: int(topology.get_dim(axis)) for axis in ("pipe", "model")}
        self._place = topology.get_coord(rank)

    def get_model_parallel_world_size(self) -> int:
        """How many ranks share this one's layers."""
        return self._sizes["model"]

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return int(self._place.model)

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages; 1 where the grid has no such axis."""
        return max(self._sizes["pipe"], 1)

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return int(getattr(self._place, "pipe", 0))


def _ask(mpu: object, what: str) -> Any:
    """Asks an older or newer object: get_model_parallel_rank() or get_tensor_model_parallel_rank()."""
    for name in (f"get_tensor_model_parallel_{what}", f"get_model_parallel_{what}"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise ConfigError(
        f"mpu: got a {type(mpu).__name__} without get_model_parallel_{what}(); expected an object as Megatron's mpu"
    )


def _of_pipeline(mpu: object, what: str) -> int | None:
    """Megatron's answer, or DeepSpeed's grid's; None: the object has neither."""
    asked = [getattr(mpu, f"get_{kind}_parallel_{what}", None) for kind in ("pipeline_model", "pipe")]
    return next((int(ask()) for ask in asked if ask is not None), None)


def _check_stages(mpu: object, world: World, stages: int) -> None:
    """Errors: ConfigError if the object tells of other stages than the model's, or of another one for this rank."""
    theirs = _of_pipeline(mpu, "world_size")
    if theirs is None:
        return
    if theirs != stages:
        raise ConfigError(
            f"mpu: its pipeline has {theirs} stages, and the model {stages}: give a PipelineModule of {theirs} "
            f"stages, or a plain model and parallel.pipeline {theirs}"
        )
    theirs = _of_pipeline(mpu, "rank")
    own = stage_of_rank(world.rank, stages, world.size)
    if theirs not in (None, own):
        raise ConfigError(
            f"mpu: rank {world.rank} is at its pipeline's stage {theirs}, expected {own}: consecutive ranks share one"
        )


def is_cut(parameter: torch.nn.Parameter) -> bool:
    """Whether a model's own layer has marked it as a slice."""
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def size_of_groups(mpu: object, world: World, stages: int) -> int:
    """How many ranks share a layer by the object. stages: of the model.

    Errors: ConfigError if its groups are no neighbours, or its stages are others.
    """
    size, rank = int(_ask(mpu, "world_size")), int(_ask(mpu, "rank"))
    _check_stages(mpu, world, stages)
    if size > 1 and rank != world.rank % size:
        raise ConfigError(
            f"mpu: rank {world.rank} is number {rank} of its model-parallel group, expected {world.rank % size}: "
            f"groups of {size} neighbours, such as ranks 0 to {size - 1}"
        )
    return size


def adopt(model: torch.nn.Module, mpu: object, world: World, timeout_s: float, stages: int = 1) -> Team | None:
    """The team of this rank's model-parallel group; None if it is alone. Collective. stages: of the model.

    Marks what the model's own layers have cut: parameters with `tensor_model_parallel` or `model_parallel`, and
    `partition_dim`, 0 or 1. Gradients of whole parameters add up where `sequence_parallel` says that ranks have parts
    of the positions, and in norms of the heads. Errors: ConfigError as of size_of_groups, or if a marked parameter has
    no dimension.
    """
    size = size_of_groups(mpu, world, stages)
    if size == 1:
        return None
    team = make_team(size, world, timeout_s, stages)
    team.core.note_own_groups()
    model.__dict__["tensor_team"] = team
    pairs = _patterns_of_pairs(model)
    for path, module in model.named_modules():
        of_heads, adding = _is_norm_of_heads(model, path), list[str]()
        for name, parameter in module.named_parameters(recurse=False):
            whole_name = f"{path}.{name}" if path else name
            slice_ = _slice_of(whole_name, parameter, size, any(re.match(pair, whole_name) for pair in pairs))
            if slice_ is not None:
                module.__dict__.setdefault("tensor_slices", {})[name] = slice_
            elif of_heads or getattr(parameter, "sequence_parallel", False):
                adding.append(name)
        if adding:
            module.__dict__["tensor_adds_up"] = frozenset(adding)
    return team


def _is_norm_of_heads(model: torch.nn.Module, path: str) -> bool:
    """Megatron names them so, and marks them for sequence parallelism only; latent attention's are of whole rows."""
    of, _, name = path.rpartition(".")
    if name not in ("q_layernorm", "k_layernorm"):
        return False
    return not getattr(getattr(model.get_submodule(of), "config", None), "multi_latent_attention", False)


def _patterns_of_pairs(model: torch.nn.Module) -> list[str]:
    """Names of parameters of which each rank has slices of two, as of gates and ups, though Megatron marks one.

    Models of Megatron-DeepSpeed tell DeepSpeed's checkpoints so.
    """
    info = getattr(model, "universal_checkpoint_info", None)
    return list(info().get("parameter_with_2_sub_params_cat_dim_0", ())) if callable(info) else []


def _slice_of(name: str, parameter: torch.nn.Parameter, size: int, is_pair: bool = False) -> Slice | None:
    if not is_cut(parameter):
        return None
    dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
    if dim not in (0, 1) or dim >= parameter.dim() or stride < 1:
        raise ConfigError(
            f"mpu: '{name}' is marked as model-parallel, and its partition_dim is {dim}; expected 0 or 1, the "
            "dimension along which ranks have slices"
        )
    blocks = max(stride, 2) if is_pair else stride
    return Slice(dim, (parameter.shape[dim] * size // blocks,) * blocks)
