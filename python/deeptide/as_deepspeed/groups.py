# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.groups: every rank takes different data, and no two share a model, a sequence or an expert."""

from __future__ import annotations

import torch.distributed as dist

from deeptide.comm import get_all_ranks_from_group, get_world_group


def get_data_parallel_group() -> dist.ProcessGroup:
    """All ranks."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """How many they are; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """This rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def _get_data_parallel_group_ranks() -> list[int]:
    return get_all_ranks_from_group()


def get_model_parallel_world_size() -> int:
    """1: each rank has a model."""
    return 1


def get_model_parallel_rank() -> int:
    """0."""
    return 0


def get_model_parallel_group() -> None:
    """None: there is no such group, as in DeepSpeed without one."""


def _zero_param_parallel_is_initialized() -> bool:
    """False: there is no group of hierarchical sharding."""
    return False


def _get_broadcast_src_rank() -> int:
    """0: all ranks take its values."""
    return 0


mpu = mesh_device = None  # as in DeepSpeed before anything sets them
_get_zero_param_intra_parallel_group = get_model_parallel_group
_clone_world_group = _get_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = _get_sequence_parallel_group = get_model_parallel_group
get_tensor_model_parallel_src_rank = get_data_parallel_rank
