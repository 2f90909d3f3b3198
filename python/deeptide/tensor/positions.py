# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks between which each rank has a part of the positions, and the layers within that get all of them.

first block          cut: a rank keeps its positions, dimension 1 of (batch, length, …)
attention, MLP       whole: all positions come together where column-parallel layers begin
row-parallel layer   reduced: the sum over the ranks, each rank's positions of it
last block           joined: all positions
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor.entry import known_as
from deeptide.tensor.leaving import note_heads, note_part
from deeptide.tensor.sequence import cut_sequence, joined_sequence
from deeptide.tensor.team import Team


class Positions:
    """The ranks' positions of one chain of blocks. A forward that keeps nothing for backward may pad the last ones."""

    def __init__(self, team: Team, chain: str) -> None:
        self.team, self._chain = team, chain
        self._length = 0  # of the last forward's activations
        self._ended = 0, 0  # what the last forward's have at the chain's end, with padding and without
        self._wholes = WeakTensorKeyDictionary()  # by a rank's positions, as long as they live

    def begin(self, x: torch.Tensor, must_divide: bool) -> torch.Tensor:
        """This rank's positions of what all have alike. Errors: ValueError if they must divide and do not."""
        self._check(x)
        length, ranks = x.shape[1], self.team.size
        if must_divide and length % ranks:
            raise ValueError(
                f"parallel.sequence_parallel_norms: {length} positions do not divide among the {ranks} ranks that "
                f"share layers, as training needs; pad the batches' sequences to multiples of {ranks}, evaluate under "
                "torch.no_grad() in evaluation mode, or leave the key out"
            )
        self._length = length
        return cut_sequence(self._padded(x), self.team)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """All positions of what each rank has a part of, for what all ranks compute alike."""
        joined = joined_sequence(x, self.team)
        trimmed = self._trimmed(joined)
        self._ended = joined.shape[1], trimmed.shape[1]
        return trimmed

    def may_be_part(self, x: torch.Tensor) -> bool:
        """Whether x is as long as a rank's positions of what left the chain last."""
        padded, length = self._ended
        return x.dim() >= 3 and x.shape[1] * self.team.size == padded and x.shape[1] != length

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The same within a block, once for all that take x: layers that ranks share send one sum back to the parts."""
        self._check(x)
        if isinstance(x, Elsewhere):
            return self.end(x)
        state = torch.is_grad_enabled(), None if x.is_inference() else x._version
        last = self._wholes.get(x)
        if last is not None and last[0] == state:
            return cast("torch.Tensor", last[1])
        made = self.end(x)
        self._wholes[x] = state, made
        if x.requires_grad and torch.is_grad_enabled():
            known_as(made, x, self.team, dim=1)
        return made

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's positions of what all ranks have computed alike within a block."""
        return cut_sequence(self._padded(whole), self.team)

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's positions of the sum of the ranks' x: (batch, length, …) -> (batch, length / ranks, …)."""
        return cut_sequence(self._padded(x), self.team, adds_up=True)

    def _check(self, x: object) -> None:
        if not isinstance(x, torch.Tensor) or x.dim() < 3:
            form = str(tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                f"parallel.sequence_parallel_norms: a layer of {self._chain} was given {form} first, expected a tensor "
                "(batch, positions, features); leave the key out"
            )

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = -x.shape[1] % self.team.size
        return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing)) if missing else x

    def _trimmed(self, x: torch.Tensor) -> torch.Tensor:
        """Without padding. A recomputation may be another forward's than the last, and no positions were padded."""
        padded = x.shape[1]
        if (
            torch.is_grad_enabled()
            or self._length == padded
            or -(-self._length // self.team.size) * self.team.size != padded
        ):
            return x
        return x.narrow(1, 0, self._length)


class OwnDropout(nn.Dropout):
    """Dropout of what each rank has other positions, heads or features of: each draws numbers of its own.

    Their seed comes of the generator from which all ranks draw alike, so a recomputation draws the same ones.
    """

    tensor_team: Team

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shapes: any."""
        if not self.training or not 0.0 < self.p < 1.0 or isinstance(input, Elsewhere | FakeTensor):
            return super().forward(input)
        seed = int(torch.randint(1 << 62, ())) + self.tensor_team.index
        generator = torch.Generator(input.device).manual_seed(seed)
        drops = torch.empty(input.shape, dtype=torch.bool, device=input.device).bernoulli_(self.p, generator=generator)
        return input.masked_fill(drops, 0.0) / (1.0 - self.p)


def _with_first(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another first one, wherever it is given: attention may take it three times."""
    first = args[0] if args else kwargs.get(name)
    changed = change(cast("torch.Tensor", first))
    return (
        tuple(changed if value is first else value for value in args),
        {key: changed if value is first else value for key, value in kwargs.items()},
    )


def _with_first_output(module: nn.Module, output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        return type(output)((change(output[0]), *output[1:]))
    raise ValueError(
        f"parallel.sequence_parallel_norms: a {type(module).__name__} returned a {type(output).__name__}, expected a "
        "tensor, or a tuple that begins with one; leave the key out"
    )


def _forward_of_block(self: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    positions: Positions = self.tensor_positions
    if self.tensor_begins:
        is_staged = "_deeptide_block" in self.__dict__  # other stages may know no length but a part's
        must_divide = self.training or torch.is_grad_enabled() or is_staged
        args, kwargs = _with_first(name, args, kwargs, lambda x: positions.begin(x, must_divide))
    output = call(self, *args, **kwargs)
    if self.tensor_ends:
        return _with_first_output(self, output, positions.end)
    note_part(output[0] if type(output) in (tuple, list) and output else output, positions.end)
    return output


def _forward_of_region(self: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    positions: Positions = self.tensor_positions
    args, kwargs = _with_first(name, args, kwargs, positions.whole)
    output = call(self, *args, **kwargs)
    return _with_first_output(self, output, positions.own) if self.tensor_is_closed else output


def _forward_of_attention(self: Any, _: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return note_heads(call(self, *args, **kwargs), self.tensor_team)


@functools.cache
def _derived(kind: type, around: Callable[..., Any]) -> type:
    """A class whose forward passes through `around`; else it is `kind`."""
    original = cast("Any", kind).forward
    name = next(iter(list(inspect.signature(original).parameters)[1:]), "")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, name, original, args, kwargs)

    names = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), names)


def _derive(module: Any, around: Any) -> None:
    kind: Any = type(module)
    module.__class__ = _derived(kind, around)


def as_block(module: Any, positions: Positions, begins: bool, ends: bool) -> None:
    """Makes a module one of a chain of blocks, between which each rank has its positions."""
    module.tensor_positions, module.tensor_begins, module.tensor_ends = positions, begins, ends
    _derive(module, _forward_of_block)


def as_region(module: Any, positions: Positions, is_closed: bool) -> None:
    """Gives a module within a block all positions of its first argument. is_closed: it returns all of them too."""
    module.tensor_positions, module.tensor_is_closed = positions, is_closed
    _derive(module, _forward_of_region)


def as_attention(module: Any, team: Team) -> None:
    """Lets the weights that attention returns leave the model with all heads, of which the rank has a part."""
    module.tensor_team = team
    _derive(module, _forward_of_attention)


def as_own_dropout(module: nn.Module, team: Team) -> None:
    """Lets each rank draw numbers of its own. Only torch's own class: another one may do more."""
    if type(module) is nn.Dropout:
        module.tensor_team = team  # type: ignore[assignment]
        module.__class__ = OwnDropout


def has_positions(model: nn.Module) -> bool:
    """Whether each rank has a part of the positions between its blocks' layers."""
    return any("tensor_positions" in module.__dict__ for module in model.modules())
