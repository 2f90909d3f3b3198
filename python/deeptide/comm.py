# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""torch.distributed under the name of deepspeed.comm, with the few functions that DeepSpeed adds to it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from deeptide._process.log import say
from deeptide._process.world import init_distributed
from deeptide.utils import engines

__all__ = [
    "ReduceOp",
    "configure",
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_world_group",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "log_summary",
]


def get_local_rank() -> int:
    """This rank's number on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError("get_world_group: there is no process group yet; call init_distributed() first")
    return group


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The world's numbers of a group's ranks."""
    return dist.get_process_group_ranks(group if group is not None else get_world_group())


def inference_all_reduce(
    tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """all_reduce in place; returns the tensor."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> object:
    """Torch's device mesh over all ranks."""
    kind = _device_kind(dist.get_backend())
    return dist.device_mesh.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def _device_kind(backend: str) -> str:
    """The device type that a default group serves beside the CPU, of "nccl", "gloo" or "cuda:nccl,cpu:gloo"."""
    if ":" not in backend:
        return "cuda" if backend == "nccl" else "cpu"
    served = (pair.partition(":")[0] for pair in backend.split(","))
    return next((kind for kind in served if kind != "cpu"), "cpu")


def has_all_gather_into_tensor() -> bool:
    """True: torch has it."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def __getattr__(name: str) -> object:
    return getattr(dist, name)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, dict[int, list[float]]] | None:
    """Prints, on rank 0, the table of each live engine's collectives, which "comms_logger" has counted.

    With return_dict: {operation: {bytes: [count, total ms, mean ms, algorithm Gbit/s, bus Gbit/s]}}. Which ranks are
    late stands below the table, whatever `show_straggler` says.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for engine in engines():
        text = engine.comms_summary()
        if text and engine.world.rank == 0:
            print(text, flush=True)
        for line in engine._core.collectives():
            figures = [line.count, line.total_ms, line.mean_ms, line.algorithm_gbps, line.bus_gbps]
            found.setdefault(line.operation, {})[line.bytes] = figures
    return found if return_dict else None


def configure(*_: object, **__: object) -> None:
    """Says that the configuration's section "comms_logger" decides, before initialize."""
    say('deepspeed.comm.configure has no effect: set "comms_logger": {"enabled": true} in the configuration')
