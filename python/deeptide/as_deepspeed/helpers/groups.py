# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.groups: every rank takes different data, unless an engine has a mesh: `mpu` is its grid then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from deeptide.comm import get_all_ranks_from_group, get_world_group

if TYPE_CHECKING:
    from deeptide.as_deepspeed.pipe.topology import PipelineParallelGrid
    from deeptide.tensor.team import Team

mpu: PipelineParallelGrid | None = None  # of the last engine with stages or shared layers that was made, until its end
team: Team | None = None  # the ranks that share layers in that engine
mesh_device = None  # as in DeepSpeed before anything sets it


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that take different data: all, or those that have this rank's part of the model."""
    return get_world_group() if mpu is None else mpu.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """How many they are; 1 without a process group."""
    if mpu is not None:
        return mpu.get_data_parallel_world_size()
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """This rank's number among them."""
    if mpu is not None:
        return mpu.get_data_parallel_rank()
    return dist.get_rank() if dist.is_initialized() else 0


def _get_data_parallel_group_ranks() -> list[int]:
    return get_all_ranks_from_group() if mpu is None else mpu.get_data_parallel_group_ranks()


def get_model_parallel_world_size() -> int:
    """How many ranks share one copy of the model, over stages and layers; 1 without a mesh."""
    return 1 if mpu is None else mpu.get_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """This rank's number among them."""
    return 0 if mpu is None else mpu.get_model_parallel_rank()


def get_model_parallel_group() -> dist.ProcessGroup | None:
    """Their group; None without a mesh: there is no such group, as in DeepSpeed."""
    return None if mpu is None else mpu.get_model_parallel_group()


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share this one's layers."""
    return 1 if mpu is None else mpu.get_slice_parallel_world_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's number among them."""
    return 0 if mpu is None else mpu.get_slice_parallel_rank()


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """Their group; None without a mesh: there is no such group."""
    return None if mpu is None else mpu.get_slice_parallel_group()


def _one() -> int:
    """1: no two ranks share a sequence."""
    return 1


def _zero() -> int:
    """0."""
    return 0


def _none() -> None:
    """None: there is no such group."""


def _zero_param_parallel_is_initialized() -> bool:
    """False: there is no group of hierarchical sharding."""
    return False


def _get_broadcast_src_rank() -> int:
    """0: all ranks take its values."""
    return 0


_get_zero_param_intra_parallel_group = _none
_clone_world_group = get_world_group
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = _one
_get_sequence_parallel_rank = _zero
_get_sequence_parallel_group = _none


def get_tensor_model_parallel_src_rank() -> int:
    """The first of the ranks that share this one's layers; without a mesh, this rank itself."""
    if mpu is not None:
        return mpu.slice_group[0]
    return dist.get_rank() if dist.is_initialized() else 0
