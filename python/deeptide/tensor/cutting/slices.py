# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Slices of parameters and of features: cut along one dimension, each block by itself, padded with zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from deeptide import _C
from deeptide._model.names import namer
from deeptide.tensor.team import Team

_PART = 1 << 20  # elements of a weight that are whole at a time
_MULTIPLE = 16  # rows: whatever a row's length is, torch draws as many numbers at a time


@dataclasses.dataclass(frozen=True)
class Slice:
    """`blocks`: sizes along `dim` in the whole tensor: (768,), or (768, 768, 768) of fused queries, keys and values.

    Each rank has ceil(block / ranks) elements of each block; the last ones are zeros where that is too much.
    """

    dim: int
    blocks: tuple[int, ...]

    def cut(self, whole: torch.Tensor, team: Team) -> torch.Tensor:
        """This rank's slice, in memory of its own."""
        parts = []
        for block, values in zip(self.blocks, whole.split(self.blocks, self.dim), strict=True):
            part = -(-block // team.size)
            begin = min(block, team.index * part)
            mine = values.narrow(self.dim, begin, min(part, block - begin))
            missing = part - mine.shape[self.dim]
            if missing > 0:
                after = [0, 0] * (whole.dim() - 1 - self.dim % whole.dim()) + [0, missing]
                mine = F.pad(mine, after)
            parts.append(mine)
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, self.dim)

    def local_shape(self, whole: torch.Size, team: Team) -> list[int]:
        """The shape of each rank's slice."""
        shape = list(whole)
        shape[self.dim] = sum(-(-block // team.size) for block in self.blocks)
        return shape

    def cut_rows(self, rows: torch.Tensor, begin: int, into: torch.Tensor, team: Team) -> None:
        """Writes what is this rank's of some rows of the whole, from row `begin` on, to its slice."""
        if self.dim % rows.dim() > 0:
            into.narrow(0, begin, len(rows)).copy_(self.cut(rows, team))
            return
        block_begin = to = 0
        for block in self.blocks:
            part = -(-block // team.size)
            mine = block_begin + min(block, team.index * part)
            first, last = max(mine, begin), min(mine + part, block_begin + block, begin + len(rows))
            if first < last:
                into.narrow(0, to + first - mine, last - first).copy_(rows.narrow(0, first - begin, last - first))
            block_begin, to = block_begin + block, to + part

    def join(self, slices: torch.Tensor) -> torch.Tensor:
        """The whole. Shapes: slices (ranks, *local)."""
        dim = self.dim if self.dim >= 0 else self.dim + slices.dim() - 1
        parts = [-(-block // slices.shape[0]) for block in self.blocks]
        ranks = [rank.split(parts, dim) for rank in slices.unbind(0)]
        parts_of_all = zip(zip(*ranks, strict=True), self.blocks, strict=True)
        return torch.cat([part for of_ranks, block in parts_of_all for part in _trimmed(of_ranks, block, dim)], dim)


def _trimmed(parts: Sequence[torch.Tensor], block: int, dim: int) -> Iterator[torch.Tensor]:
    """The ranks' parts of a block, without what pads it."""
    for part in parts:
        size = min(block, part.shape[dim])
        yield part.narrow(dim, 0, size)
        block -= size


def rows_of(x: torch.Tensor, team: Team, dim: int) -> torch.Tensor:
    """Each rank's positions: (ranks, *part). Errors: ValueError if they do not divide."""
    if x.shape[dim] % team.size:
        raise ValueError(
            f"sequence-parallel layers: {x.shape[dim]} positions do not divide among {team.size} ranks; pad the "
            "sequences"
        )
    return torch.stack(x.chunk(team.size, dim))


def slices_of(module: torch.nn.Module) -> Iterator[tuple[str, Slice]]:
    """The slices of a model by their parameters' names, every name of a shared one."""
    cuts: dict[int, Slice] = {}
    for child in module.modules():
        for name, slice_ in child.__dict__.get("tensor_slices", {}).items():
            cuts[id(getattr(child, name))] = slice_
    plain = namer(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in cuts:
            yield plain(name), cuts[id(parameter)]


def adding_names(module: torch.nn.Module) -> Iterator[str]:
    """Parameters that are whole on each rank, and see a part of the features there: their gradients add up."""
    for path, child in module.named_modules(remove_duplicate=False):
        adds_up = child.__dict__.get("tensor_adds_up", ())  # names, or True: all that are whole
        for name, _ in child.named_parameters(recurse=False) if adds_up else ():
            if name not in child.__dict__.get("tensor_slices", {}) and (adds_up is True or name in adds_up):
                yield f"{path}.{name}" if path else name


def cut_parameter(module: torch.nn.Module, name: str, slice_: Slice, team: Team) -> None:
    """Leaves this rank's slice in a parameter, which stays the same object. Tied ones are cut once.

    One that was built under zero.Init gets values here, the first rank's, some rows at a time.
    """
    parameter = getattr(module, name)
    if parameter is None:
        return
    module.__dict__.setdefault("tensor_slices", {})[name] = slice_
    if parameter.shape[slice_.dim] != sum(slice_.blocks):
        return  # under another name already
    with torch.no_grad():
        if _C.is_deferred(parameter):
            _make_slice(parameter, slice_, team)
        else:
            parameter.data = slice_.cut(parameter.data, team)


def _make_slice(parameter: torch.Tensor, slice_: Slice, team: Team) -> None:
    """Gives a parameter that is deferred this rank's slice of the first rank's values, which pass by in rows."""
    parts = _C.ValueParts.of(parameter) if team.index == 0 else None
    passes = torch.tensor(float(parts is not None))
    team.core.broadcast(passes, "start")
    if not passes:
        _C.materialize(parameter)
        team.core.broadcast(parameter.data, "start")
        parameter.data = slice_.cut(parameter.data, team)
        return
    mine = torch.zeros(slice_.local_shape(parameter.shape, team), dtype=parameter.dtype)
    row = parameter[0].numel()
    rows = _MULTIPLE * max(1, _PART // (row * _MULTIPLE))
    for begin in range(0, len(parameter), rows):
        count = row * min(rows, len(parameter) - begin)
        values = torch.empty(count, dtype=parameter.dtype) if parts is None else parts.next(count)
        team.core.broadcast(values, "start")
        slice_.cut_rows(values.view(-1, *parameter.shape[1:]), begin, mine, team)
    _C.replace_values(parameter, mine)


def become(module: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
    """Makes a module one of `cls` too; it stays the same object, with its hooks.

    A class derived from a layer of torch stands in for that layer: what the module's own class does around torch's
    forward, such as to scale it, stays. Another one goes before the module's own.
    """
    own, base = type(module), cls.__mro__[1]
    if issubclass(own, cls):
        return
    if base is own:
        module.__class__ = cls
    elif base is torch.nn.Module:
        module.__class__ = type(cls.__name__, (cls, own), {})
    else:
        module.__class__ = type(own.__name__, (own, cls), {})


def as_adding(module: torch.nn.Module, team: Team) -> None:
    """Marks a layer that sees a part of the features or positions: what of it is whole gets gradients that add up."""
    module.tensor_team = team  # type: ignore[assignment]
    module.tensor_adds_up = True  # type: ignore[assignment]


def add_up(model: torch.nn.Module, name: str, team: Team) -> None:
    """Marks one whole parameter, by its name, as one whose gradients add up, in all modules that have it."""
    marked = model.get_parameter(name)
    for module in model.modules():
        names = {own for own, parameter in module._parameters.items() if parameter is marked}
        before = module.__dict__.get("tensor_adds_up", ())
        if names and before is not True:
            module.tensor_team = team  # type: ignore[assignment]
            module.tensor_adds_up = frozenset(before) | names  # type: ignore[assignment]
