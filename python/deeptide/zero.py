# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's names for sharded parameters: zero.Init, GatheredParameters, register_external_parameter."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from deeptide import _C
from deeptide._model import changes, tensor_methods

# parameter -> its place in an order that all ranks have: that of construction inside Init, then of engines.
_places = WeakIdKeyDictionary()
_next_place = itertools.count()


def __getattr__(name: str) -> Any:
    """DeepSpeed's estimates, which few programs ask for."""
    if name.startswith("estimate_zero"):
        from deeptide._forecast import estimates

        return getattr(estimates, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a parameter. Here operators bring parameters in, so a reader always finds AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """DeepSpeed's kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def number_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Gives each parameter its place in the order in which all ranks act on it; one that has a place keeps it."""
    for parameter in parameters:
        if parameter not in _places:
            _places[parameter] = next(_next_place)


def place_of(parameter: torch.Tensor) -> int | None:
    """The parameter's place in that order; None for a tensor that neither Init nor an engine knows."""
    place: int | None = _places.get(parameter)
    return place


class Init(contextlib.ContextDecorator):
    """Models that are built inside take no memory until `initialize`, which makes them unit by unit.

    What operators do to tensors of floating types on the CPU is recorded, not done; `initialize` takes rank 0's values,
    which have the bits of ordinary construction, and torch's generator ends where that would leave it. Tensors of less
    than 64 KiB are made at once. Before `initialize` such a model may be copied, tied, cast, written and, under
    torch.no_grad(), read. Arguments that say how DeepSpeed would shard at once have no effect (`dtype`: the
    configuration's type is taken at `initialize`); `enabled=False` makes it nothing at all.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        **others: object,
    ) -> None:
        self.enabled = enabled
        self._scope: _C.ZeroInit | None = None
        if module is not None and enabled:
            self._take(module.parameters())

    def _take(self, parameters: Iterable[torch.Tensor]) -> None:
        number_parameters(parameters)

    def __enter__(self) -> Init:
        if self.enabled:
            tensor_methods.install()
            self._scope = _C.ZeroInit()
            changes.listen(self._registered)
        return self

    def _registered(self, parameter: torch.nn.Parameter) -> None:
        self._take([parameter])

    def __exit__(self, *exc_info: object) -> None:
        if self.enabled:
            changes.stop_listening(self._registered)
        self._scope = None


class _Lent:
    """One parameter inside GatheredParameters: whole memory of its own in place of the shard's.

    One that Init has deferred stays so: writes are recorded, and `initialize` takes rank 0's.
    """

    def __init__(self, parameter: torch.Tensor, source: int | None) -> None:
        self.parameter = parameter
        self.own: torch.Tensor | None = None
        self.deferred = _C.is_deferred(parameter)
        # Ranks of a host may share its memory, in which the writes of others than `source` would meet.
        is_written_apart = source is not None and not self.deferred
        if _C.is_sharded(parameter) or is_written_apart:
            with torch.no_grad():
                whole = parameter.detach().clone()
            self.own = parameter.data
            _C.lend_memory(parameter, whole)

    def take_back(self, source: int | None) -> torch.Tensor | None:
        """Gives the shard its memory back; returns what was written, where a rank's writes are to stay."""
        if self.deferred and not source:
            return None
        with torch.no_grad():
            if self.own is None:
                return None if source is None else _C.values_of(self.parameter)
            values = self.parameter.data
            self.parameter.data = self.own
            return None if source is None else values

    def spread(self, values: torch.Tensor, source: int) -> None:
        """Gives every rank the values of rank `source`."""
        _broadcast(values, source, self.parameter)
        with torch.no_grad():
            self.parameter.copy_(values)  # also on `source`: a write through .data tells nobody, this does


def _broadcast(values: torch.Tensor, source: int, parameter: torch.Tensor) -> None:
    from deeptide.utils import engine_of

    engine = engine_of(parameter)
    if engine is not None:  # whose channels carry what its device holds, with torch.distributed and without
        if engine.world.size > 1:
            engine._core.broadcast(values, source)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(values, source)


def _flat(params: object) -> Iterator[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, dict):
        yield from _flat(params.values())
    elif isinstance(params, Iterable):
        for item in params:
            yield from _flat(item)


class GatheredParameters:
    """Inside, the parameters are whole on every rank and may be read and written without any other rank. Collective.

    params: a tensor, or any iterable of them, in any order; those that belong to no engine and were not built inside
    Init are left alone. modifier_rank: the rank whose values all ranks have afterwards; without it what was written is
    dropped where parameters are sharded. An exception passes through, and what it left is kept.
    """

    def __init__(
        self,
        params: object,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        known: dict[int, torch.Tensor] = {}
        for parameter in _flat(params) if enabled else ():
            place = place_of(parameter)
            if place is not None:
                known[place] = parameter
        self.params = [known[place] for place in sorted(known)]
        self.src_rank = modifier_rank
        self._lent: list[_Lent] = []

    def __enter__(self) -> None:
        self._lent = [_Lent(parameter, self.src_rank) for parameter in self.params]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lent, self._lent = self._lent, []
        # The engine, which is to carry them, takes only parameters in memory of their own.
        written = [(one, one.take_back(self.src_rank)) for one in lent]
        for one, values in written:
            if values is not None and self.src_rank is not None:
                one.spread(values, self.src_rank)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Does nothing, under DeepSpeed's name: any operator may use a parameter, in whichever module it stands."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter: got {type(parameter).__name__}, expected a Parameter")


unregister_external_parameter: Callable[[torch.nn.Module, torch.nn.Parameter], None] = register_external_parameter
