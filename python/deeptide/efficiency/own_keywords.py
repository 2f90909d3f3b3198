# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose forward does not read an engine's keywords: batches that are cut, and blocks that are found for it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeptide._C import ConfigError
from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide.engine import Engine

_EMBEDDINGS = "inputs_embeds"  # what stands for the tokens in their place
_NOT_FOUND = (
    "progressive_layer_drop is on, and nothing is dropped: forward of {name} names no pld_theta, and {reason}; call "
    "deeptide.efficiency.drop_layers(engine, blocks), or turn the section off"
)
_NO_TOKENS = (
    "curriculum_learning is on, and nothing is cut: forward of {name} names no curriculum_seqlen and got no tensor of "
    "tokens (batch, length); pass input_ids, or name the keyword and cut there, or turn the section off"
)


def _parameters_of(forward: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # written in C++
        return {}


def reads(model: torch.nn.Module, keyword: str) -> bool:
    """Whether the model's forward names the keyword, or hands on all keywords and a module below names it."""
    own = _parameters_of(model.forward)
    if keyword in own:
        return True
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in own.values()):
        return False
    kinds = {type(module) for module in model.modules()}
    return any(keyword in _parameters_of(kind.forward) for kind in kinds)


# -- sequence lengths --------------------------------------------------------------------------------------------------


class BatchCutter:
    """Cuts the arguments of a model's forward to the curriculum's length."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = _parameters_of(model.forward).values()
        self._names = [p.name for p in named if p.kind is not inspect.Parameter.VAR_KEYWORD]
        self._kind = type(model).__name__
        self._has_warned = False

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with their first `length` tokens; a shorter batch is left whole."""
        names = [*self._names, *("" for _ in args)][: len(args)]
        whole = _length_of({**{name or str(i): one for i, (name, one) in enumerate(zip(names, args))}, **kwargs})
        if whole is None:
            if not self._has_warned:
                say(_NO_TOKENS.format(name=self._kind), "warning")
            self._has_warned = True
            return args, kwargs
        if whole <= length:
            return args, kwargs
        cut_args = tuple(_cut(name, one, whole, length) for name, one in zip(names, args))
        return cut_args, {name: _cut(name, one, whole, length) for name, one in kwargs.items()}


def _length_of(named: dict[str, Any]) -> int | None:
    """The tokens per row: of input_ids, of embeddings in their place, or of the first integer matrix."""
    for name in ("input_ids", _EMBEDDINGS):
        if isinstance(named.get(name), Tensor) and named[name].dim() > 1:
            return int(named[name].size(1))
    for one in named.values():
        if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point() and not one.is_complex():
            return int(one.size(1))
    return None


def _cut(name: str, value: Any, whole: int, length: int) -> Any:
    """The value's first tokens, if it is a tensor with as many integers, or a mask's rows and columns, as tokens."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    is_mask = "mask" in name or value.dtype == torch.bool
    if (value.is_floating_point() or value.is_complex()) and not is_mask and name != _EMBEDDINGS:
        return value
    dims: tuple[int, ...] = (1,)
    if value.dim() > 2 and is_mask:
        dims = (value.dim() - 2, value.dim() - 1)
    elif value.dim() > 2 and name == "position_ids":  # several kinds of positions, each (batch, length)
        dims = (value.dim() - 1,)
    for dim in dims:
        if value.size(dim) == whole:
            value = value.narrow(dim, 0, length)
    return value.contiguous()  # models call view


# -- layers ------------------------------------------------------------------------------------------------------------


def drop_found_layers(engine: Engine) -> None:
    """Lets the engine leave out the blocks along which a pipeline would cut its model; warns where there are none."""
    from deeptide.efficiency.layer_drop import drop_chain
    from deeptide.pipeline.cutting.blocks import find_blocks

    model, reason = engine.module, ""
    name = type(model).__name__
    try:
        parts = find_blocks(model, 2).parts
    except ConfigError as error:
        parts, reason = [], "it has no ModuleList of two blocks or more"
        if "more than one chain" in str(error):
            reason = "it has more than one chain of blocks"
    if any(len({type(block) for block in part.blocks}) > 1 for part in parts):
        parts, reason = [], f"{parts[0].path} has blocks of several classes"
    if not parts:
        say(_NOT_FOUND.format(name=name, reason=reason), "warning")
    for part in parts:
        drop_chain(engine, part.blocks, part.path)
