# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank this process is, and what rank 0 tells the others, before there is an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from deeptide import _C
from deeptide._process.world import init_distributed


def place(world: _C.World | None) -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and not dist.is_initialized():
        init_distributed()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def of_first_rank(world: _C.World | None, make: Callable[[], str]) -> str:
    """Returns on all ranks what `make` returns on rank 0. Collective."""
    rank, num_ranks = place(world)
    if num_ranks == 1:
        return make()
    store = world.store if world is not None else dist.distributed_c10d._get_default_store()
    number = store.add(f"deeptide/pipeline/asked/{rank}", 1)  # each rank counts its own calls, which are alike
    key = f"deeptide/pipeline/told/{number}"
    if rank == 0:
        store.set(key, make())
    return str(store.get(key).decode())
