# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""How the front finds the ranks that train together, and hands them to the core."""

import itertools
import os

import torch
import torch.distributed as dist

from deeptide import _C
from deeptide._C import ConfigError

# All ranks create their engines in the same order, so the same number means the same engine everywhere.
_engine_numbers = itertools.count()


def _backend_for(device_type):
    return "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"


def _launched():
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def init_distributed(
    dist_backend=None, *, distributed_port=29500, timeout=None, init_method=None, rank=-1, world_size=-1
):
    """Initialises torch.distributed once, from the variables of torchrun or `deeptide`, or from rank and world_size.

    Without either (a plain `python train.py`) it does nothing: a world of one needs no process group.
    """
    if dist.is_initialized() or (rank < 0 and not _launched()):
        return
    if dist_backend is None:
        dist_backend = _backend_for("cuda" if torch.cuda.is_available() else "cpu")
    if init_method is None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def _from_torch_distributed(device):
    """The default group's ranks; returns the world and the NCCL group that was made for it, if any."""
    number = next(_engine_numbers)
    store = dist.PrefixStore(f"deeptide/{number}", dist.distributed_c10d._get_default_store())
    world = _C.make_world(store, dist.get_rank(), dist.get_world_size())
    world.local_rank = int(os.environ.get("LOCAL_RANK", device.index or 0))
    world.source = "torch.distributed"
    group = None
    if device.type == "cuda" and world.size > 1:
        group = dist.new_group(backend="nccl")
        world.use_group(group.group_name, device)
    return world, group


def find_world(world, device, dist_init_required=None, distributed_port=29500):
    """The world given, else torch.distributed's, else the launcher's, else a world of one; and a group to destroy."""
    if world is not None:
        if not isinstance(world, _C.World):
            raise ConfigError(f"world: got {type(world).__name__}, expected a deeptide.World (deeptide.make_world)")
        return world, None
    if not dist.is_available():
        return _C.init_distributed(), None
    if not dist.is_initialized():
        if dist_init_required is False:
            raise ConfigError(
                "dist_init_required is False, but torch.distributed is not initialised; "
                "call deeptide.init_distributed() first, or leave dist_init_required out"
            )
        init_distributed(_backend_for(device.type), distributed_port=distributed_port)
    if dist.is_initialized():
        return _from_torch_distributed(device)
    return _C.init_distributed(), None
