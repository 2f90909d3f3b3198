# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""How the front finds the ranks that train together, and hands them to the core."""

import datetime
import itertools
import os

import torch
import torch.distributed as dist

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._log import say
from deeptide.config import load_config

# All ranks create their engines in the same order, so the same number means the same engine everywhere.
_engine_numbers = itertools.count()


# Where ranks of a launcher that speaks its own language find each other by torch's names afterwards.
_VARIABLES = {
    "RANK": lambda place: place.rank,
    "WORLD_SIZE": lambda place: place.size,
    "LOCAL_RANK": lambda place: place.local_rank,
    "MASTER_ADDR": lambda place: place.address,
    "MASTER_PORT": lambda place: place.port,
}


def _backend_for(device_type):
    return "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"


def _default_timeout():
    """DeepSpeed's: DEEPSPEED_TIMEOUT minutes, 10 if it is not set."""
    text = os.environ.get("DEEPSPEED_TIMEOUT") or "10"
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"environment variable DEEPSPEED_TIMEOUT={text}: expected a number of minutes, at least 1")
    return datetime.timedelta(minutes=int(text))


def _place(auto_mpi_discovery, distributed_port, rank, world_size):
    """Where this process stands: as the caller says, else as the launcher's variables do; None: nobody says."""
    if (rank < 0) != (world_size < 0):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither to have them discovered")
    if rank >= 0:
        if rank >= world_size:
            raise ConfigError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        place = _C.Discovery()
        place.rank, place.size, place.source = rank, world_size, "arguments"
        place.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        place.address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        place.port = int(os.environ.get("MASTER_PORT", distributed_port))
        return place
    if not auto_mpi_discovery and "RANK" not in os.environ:
        return None
    return _C.discover_world(distributed_port)


def _check_initialised(dist_init_required):
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required is False, but torch.distributed is not initialised; "
            "call deeptide.init_distributed() first, or leave dist_init_required out"
        )


def init_distributed(
    dist_backend=None,
    auto_mpi_discovery=True,
    distributed_port=29500,
    verbose=True,
    timeout=None,
    init_method=None,
    dist_init_required=None,
    config=None,
    rank=-1,
    world_size=-1,
):
    """Initialises torch.distributed once, for whoever launched this process: `deeptide`, torchrun, mpirun, srun, ...

    Without a launcher (a plain `python train.py`) it does nothing: a world of one needs no process group.
    auto_mpi_discovery: False reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT only. distributed_port: where rank 0
    listens when nothing else says. timeout: a timedelta; else DEEPSPEED_TIMEOUT minutes, else 10. init_method: torch's,
    instead of the discovered address. config: is validated. rank, world_size: instead of what the launcher says.
    Errors: ConfigError, e.g. listing two launchers that disagree; CommError if the ranks do not meet.
    """
    if config is not None:
        load_config(config)
    if dist.is_initialized():
        return
    _check_initialised(dist_init_required)
    place = _place(auto_mpi_discovery, distributed_port, rank, world_size)
    if place is None or not (place.address or init_method):
        return
    if dist_backend is None:
        dist_backend = _backend_for("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, str(value(place)))
    timeout = _default_timeout() if timeout is None else timeout
    if verbose and place.rank == 0:
        where = init_method or f"{place.address}:{place.port}"
        say(f"a world of {place.size} from {place.source}, at {where}", "debug")
    who = {"rank": place.rank, "world_size": place.size, "timeout": timeout}
    if init_method is not None:
        dist.init_process_group(dist_backend, init_method=init_method, **who)
    else:
        world = _C.join_world(place, timeout.total_seconds())
        dist.init_process_group(dist_backend, store=world.store, **who)


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
        init_distributed(
            _backend_for(device.type), distributed_port=distributed_port, dist_init_required=dist_init_required
        )
    if dist.is_initialized():
        return _from_torch_distributed(device)
    return _C.init_distributed(), None
