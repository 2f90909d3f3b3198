# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank this process is, before there is an engine."""

from __future__ import annotations

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
