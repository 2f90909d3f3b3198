# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that train together and passes them to the core."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._process.operators import share_operators
from deeptide.config import ConfigSource, load_config

# Seconds that NCCL waits for a collective beyond "comm_timeout", before it ends the process: the engine's own wait is
# to end first, in an error that names the ranks.
_WATCHDOG_GRACE_S = 30.0


def make_world(store: dist.Store, rank: int, size: int, host: str = "") -> _C.World:
    """Makes one of several ranks that are threads of one process, in tests and notebooks.

    store: shared by all, such as a torch.distributed.HashStore. host: ranks of different names treat each other as on
    other machines. Errors: ConfigError for a rank outside of the world.
    """
    share_operators()
    return _C.make_world(store, rank, size, host)


def _backend_for(device_type: str) -> str:
    return "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"


def _publish(place: _C.Discovery) -> None:
    """Sets torch's variables for code that reads them, under any launcher."""
    variables: dict[str, int | str] = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    if place.address:
        variables |= {"MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _C.DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: ConfigSource | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises torch.distributed once, under any launcher: `deeptide`, torchrun, mpirun, srun, ...

    Has no effect without a launcher (a plain `python train.py`), because a world of one needs no process group.
    auto_mpi_discovery: False reads only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. distributed_port: the port of
    rank 0, unless the environment gives one. timeout: a timedelta; default DEEPSPEED_TIMEOUT minutes, or 10 minutes.
    init_method: the meeting point, tcp://HOST:PORT, file://PATH or env://. config: validated, otherwise unused. rank,
    world_size: override the launcher's values.
    Errors: ConfigError, for example for two launchers that disagree; CommError if the ranks do not meet.
    """
    if config is not None:
        load_config(config)
    if dist.is_initialized():
        return
    options = _C.DistributedOptions()
    options.auto_mpi_discovery, options.distributed_port, options.verbose = (
        auto_mpi_discovery,
        distributed_port,
        verbose,
    )
    options.init_method, options.dist_init_required = init_method or "", dist_init_required
    options.rank, options.world_size = rank, world_size
    if timeout is not None:
        options.timeout_s = timeout.total_seconds()
    place = _C.find_place(options)
    if place is None or not (place.address or place.file):
        return
    if dist_backend is None:
        dist_backend = _backend_for("cuda" if torch.cuda.is_available() else "cpu")
    world = _C.join_world(place, options.timeout_s)
    _publish(place)
    dist.init_process_group(
        dist_backend,
        store=world.store,
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=options.timeout_s),
    )


def _backend_of_groups(device: torch.device) -> str | None:
    """The backend of the groups for the device's tensors; None: it needs none. Errors: ConfigError if there is none."""
    if device.type in ("cpu", "meta") or dist.get_world_size() == 1:  # the core refuses tensors without memory
        return None
    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise ConfigError(
            f"the model is on {device}, but torch.distributed has no backend for the device type '{device.type}'; "
            "import the package that registers one (dist.Backend.register_backend), or pass a world"
        )
    return backend


class _DeviceGroups:
    """The groups that carry device tensors, made as the core asks for them: by their ranks and what they are for.

    Parameters and gradients each have groups of their own: ranks that take different branches may issue a gather and a
    reduction in different orders.
    """

    def __init__(self, device: torch.device, backend: str, timeout_s: float | None) -> None:
        """timeout_s: of a collective; None: torch's."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device, self._backend = torch.device(device.type, index), backend
        self._timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s + _WATCHDOG_GRACE_S)
        self._found: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self.made: list[dist.ProcessGroup] = []

    def find(self, ranks: Sequence[int], kind: str) -> str:
        """The name of a group. Collective over `ranks`."""
        key = (tuple(ranks), kind)
        if key not in self._found:
            # With the device, NCCL connects the ranks here, where all of them come, and not in a first collective.
            options: dict[str, Any] = {"backend": self._backend, "timeout": self._timeout, "device_id": self._device}
            part = len(ranks) < dist.get_world_size()
            self._found[key] = dist.new_group(list(ranks) if part else None, use_local_synchronization=part, **options)
            self.made.append(self._found[key])
        return str(self._found[key].group_name)


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends what they have under way, which would never end without the peer that was lost. For a device's groups."""
    for group in groups:
        with contextlib.suppress(Exception):  # it may have failed, or have ended
            group.abort()


def _from_torch_distributed(
    device: torch.device, timeout_s: float | None
) -> tuple[_C.World, Sequence[dist.ProcessGroup]]:
    """Returns the world of the default group's ranks, and the groups that are made for its device tensors."""
    backend = _backend_of_groups(device)  # before others are asked: ranks that are refused end, and the store with them
    # All ranks create a group's engines in the same order, so the same number means the same engine everywhere. It is
    # counted where the group meets: a rank may have made other engines before, in a group of others.
    common = dist.distributed_c10d._get_default_store()
    number = common.add(f"deeptide/engines of rank {dist.get_rank()}", 1)
    store = dist.PrefixStore(f"deeptide/{number}", common)
    world = _C.make_world(store, dist.get_rank(), dist.get_world_size())
    world.local_rank = int(os.environ.get("LOCAL_RANK", device.index or 0))
    world.source = "torch.distributed"
    if backend is None:
        return world, ()
    groups = _DeviceGroups(device, backend, timeout_s)
    world.use_groups(groups.find, device)
    return world, groups.made


def find_world(
    world: _C.World | None,
    device: torch.device,
    dist_init_required: bool | None = None,
    distributed_port: int = _C.DEFAULT_PORT,
    timeout_s: float | None = None,
) -> tuple[_C.World, Sequence[dist.ProcessGroup]]:
    """Returns `world`, else torch.distributed's, else the launcher's, else a world of one; and groups to destroy.

    The core makes these as it binds a model to the world. timeout_s: of a collective on a device; None: torch's.
    """
    if world is not None:
        if not isinstance(world, _C.World):
            raise ConfigError(f"world: got {type(world).__name__}, expected a deeptide.World (deeptide.make_world)")
        return world, ()
    if not dist.is_available():
        return _C.init_distributed(), ()
    if not dist.is_initialized():
        init_distributed(
            _backend_for(device.type), distributed_port=distributed_port, dist_init_required=dist_init_required
        )
    if dist.is_initialized():
        return _from_torch_distributed(device, timeout_s)
    return _C.init_distributed(), ()
