# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Progressive layer drop for models whose forward knows nothing of it. Source: Zhang and He, arXiv:2010.13369."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deeptide import _C
from deeptide._C import ConfigError

if TYPE_CHECKING:
    from deeptide.engine import Engine


class DroppedLayer(torch.nn.Module):
    """Lets its input pass, with a probability, instead of running the layer that it replaces."""

    _depth: tuple[Any, int, int]  # the schedule, this layer's number, how many there are

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, or its first argument in the output's place."""
        layer = super().forward
        schedule, number, count = self._depth
        if not self.training or schedule.current >= 1.0:
            return layer(*args, **kwargs)
        keep = schedule.keep_probability(number, count, schedule.current)
        # torch's generator of the CPU: a checkpoint keeps it, and a recomputation finds it where it was.
        if keep >= 1.0 or float(torch.rand(())) < keep:
            return layer(*args, **kwargs)
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(
                f"progressive layer drop: layer {number} was called with {type(hidden).__name__} first, expected the "
                "hidden states, a tensor"
            )
        return (hidden,) if self.__dict__["_returns_tuple"] else hidden


def drop_layers(engine: Engine, layers: torch.nn.ModuleList, returns_tuple: bool = False) -> None:
    """Lets the engine leave out `layers` of its model by its schedule; forward then gets no arguments about it.

    Each layer stays the same object, with its parameters' names. returns_tuple: whether a layer returns its hidden
    states as the first of a tuple. Errors: ConfigError where the section "progressive_layer_drop" is off.
    """
    schedules = engine._less_work
    if schedules is None or schedules.layers is None:
        raise ConfigError("drop_layers: the section progressive_layer_drop is off; set its enabled to true")
    for number, layer in enumerate(layers):
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (DroppedLayer, kind), {"__module__": kind.__module__})
        layer.__dict__["_depth"] = (_Share(schedules.layers), number, len(layers))
        layer.__dict__["_returns_tuple"] = returns_tuple
    schedules.tells_forward = False


class _Share:
    """The schedule, shared by a layer and its copies."""

    def __init__(self, schedule: _C.LayerDropSchedule) -> None:
        self._schedule = schedule

    def __deepcopy__(self, memo: dict[int, Any]) -> _Share:
        return self

    @property
    def current(self) -> float:
        """The share of now."""
        return self._schedule.current

    @staticmethod
    def keep_probability(number: int, count: int, share: float) -> float:
        """See LayerDropSchedule.keep_probability."""
        return _C.LayerDropSchedule.keep_probability(number, count, share)
