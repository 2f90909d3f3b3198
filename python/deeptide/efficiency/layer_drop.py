# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Progressive layer drop for models whose forward knows nothing of it. Source: Zhang and He, arXiv:2010.13369."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from deeptide import _C
from deeptide._C import ConfigError

if TYPE_CHECKING:
    from deeptide.engine import Engine

DEPTH = "_deeptide_depth"  # of a layer that may be left out


def _plain(kind: Any) -> Any:
    return kind.__new__(kind)


def plain_copy(layer: torch.nn.Module, reduced: Any, left_out: str) -> Any:
    """Pickles the layer as its own class, without the attribute `left_out`. reduced: of the class above."""
    made, args, state, *rest = reduced
    if args and args[0] is type(layer):
        made, args = _plain, (next(kind for kind in type(layer).__mro__ if not issubclass(kind, Added)),)
    return made, args, {name: value for name, value in state.items() if name != left_out}, *rest


class _Depth:
    """A layer's place in its chain, and the schedule that it follows."""

    def __init__(self, schedule: _C.LayerDropSchedule, number: int, chain: _Chain) -> None:
        self._schedule, self._number, self.chain = schedule, number, chain

    def drops(self) -> bool:
        """Draws whether this call leaves the layer out."""
        # By torch's generator of the CPU: a checkpoint keeps it, and a recomputation finds it where it was.
        return self._schedule.drops(self._number, self.chain.count)

    @property
    def name(self) -> str:
        """The layer, for errors."""
        return f"{self.chain.path}.{self._number}" if self.chain.path else str(self._number)


class _Chain:
    """Layers that run one after the other. returns_tuple: None until the first one, which always runs, has shown it."""

    def __init__(self, path: str, count: int, returns_tuple: bool | None) -> None:
        self.path, self.count, self.returns_tuple = path, count, returns_tuple
        self._is_known = returns_tuple is not None

    def learn(self, name: str, hidden: Any, output: Any) -> None:
        """Takes the form of a layer's output. Errors: ConfigError if its input cannot stand for it."""
        if self._is_known:
            return
        whole = output if isinstance(output, tuple) else (output,)
        fits = isinstance(hidden, torch.Tensor) and isinstance(whole[0], torch.Tensor) and len(whole) == 1
        if not fits or hidden.shape != whole[0].shape or not hidden.is_floating_point():
            form = [tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in whole]
            raise ConfigError(
                f"progressive layer drop: layer {name} returned {form}, expected hidden states of its input's shape "
                "alone; call deeptide.efficiency.drop_layers(engine, blocks) after initialize with the blocks to drop, "
                "or turn the section progressive_layer_drop off"
            )
        self.returns_tuple = isinstance(output, tuple)


class Added(torch.nn.Module):
    """Mixed into the class of a layer, which stays the same object."""


class DroppedLayer(Added):
    """Lets its input pass, with a probability, instead of running the layer that it replaces."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, or its first argument in the output's place."""
        layer = super().forward
        depth: _Depth | None = self.__dict__.get(DEPTH)
        if depth is None or not self.training:
            return layer(*args, **kwargs)
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if not depth.drops():
            output = layer(*args, **kwargs)
            depth.chain.learn(depth.name, hidden, output)
            return output
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(
                f"progressive layer drop: layer {depth.name} was called with {type(hidden).__name__} first, expected "
                "the hidden states, a tensor"
            )
        return (hidden,) if depth.chain.returns_tuple else hidden

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the plain class: what is copied or pickled belongs to no engine."""
        return plain_copy(self, super().__reduce_ex__(protocol), DEPTH)


def refuse_parts(layer: torch.nn.Module, what: str) -> None:
    """Errors: ConfigError if each rank has a part of the positions of a layer that is left out in whole or in part."""
    if "tensor_positions" in layer.__dict__:
        raise ConfigError(
            f"{what} does not go with parallel.sequence_parallel_norms, whose blocks cut and join positions; leave one "
            "of them out"
        )


def drop_chain(
    engine: Engine, layers: Iterable[torch.nn.Module], path: str = "", returns_tuple: bool | None = None
) -> None:
    """Lets the engine leave out layers by its schedule, which is on. returns_tuple: None to see it of their outputs."""
    schedules = engine._less_work
    assert schedules is not None and schedules.layers is not None
    layers = list(layers)
    for layer in layers:
        refuse_parts(layer, "progressive layer drop")
    chain = _Chain(path, len(layers), returns_tuple)
    for number, layer in enumerate(layers):
        kind: Any = type(layer)
        if not issubclass(kind, DroppedLayer):
            layer.__class__ = type(kind.__name__, (DroppedLayer, kind), {"__module__": kind.__module__})
        layer.__dict__[DEPTH] = _Depth(schedules.layers, number, chain)
    schedules.tells_layers = False


def keep_layers(model: torch.nn.Module) -> None:
    """Ends what an earlier engine of the model, or its search for blocks, began."""
    for module in model.modules():
        module.__dict__.pop(DEPTH, None)


def drop_layers(engine: Engine, layers: torch.nn.ModuleList, returns_tuple: bool = False) -> None:
    """Lets the engine leave out `layers` of its model by its schedule; forward then gets no arguments about it.

    They take the place of the blocks that initialize found. Each layer stays the same object, with its parameters'
    names. returns_tuple: whether a layer returns its hidden states as the first of a tuple. Errors: ConfigError where
    the section "progressive_layer_drop" is off.
    """
    schedules = engine._less_work
    if schedules is None or schedules.layers is None:
        raise ConfigError("drop_layers: the section progressive_layer_drop is off; set its enabled to true")
    if schedules.has_found_layers:
        keep_layers(engine.module)
        schedules.has_found_layers = False
    drop_chain(engine, layers, returns_tuple=returns_tuple)
