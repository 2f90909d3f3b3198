# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Weights for the check at the start: no two heads and no two columns are alike. Their bits come back afterwards.

A fresh model has norms of ones and biases of zeros, so a norm that meets the wrong heads computes the same. Bits of
each value's mantissa are flipped, by its row and its column, which changes it by at most a factor of two, and flipped
back later. So no copy of the weights is kept, and a slice that was cut meanwhile gets its own bits back.

    value      sign eeeeeeee mmmmmmm ^ (hash of row ^ hash of column)
    zero       sign ssssssss           (hash of row ^ hash of column), s: an exponent that no other value has
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from deeptide.tensor.cutting.slices import Slice
from deeptide.tensor.team import Team

_FORMATS = {  # (integers of the size, bits of a mantissa)
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}
_PART = 1 << 20  # elements that are changed at a time
_HASHED = 23  # bits


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """The change of one parameter. `exponent`: of what stands for its zeros; None: they stay zeros."""

    number: int
    shape: torch.Size
    exponent: int | None


def _is_possible(parameter: torch.Tensor) -> bool:
    has_own_memory = all(
        stride > 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True) if size > 1
    )
    return parameter.dtype in _FORMATS and parameter.numel() > 0 and has_own_memory


class Perturbed:
    """A model's weights, changed where they lie, until restore()."""

    def __init__(self, model: nn.Module) -> None:
        self._patterns: dict[nn.Parameter, _Pattern] = {}
        for number, parameter in enumerate(model.parameters()):
            if _is_possible(parameter):
                pattern = _Pattern(number, parameter.shape, _free_exponent(parameter.data))
                self._patterns[parameter] = pattern
                for bits, masks in _parts(parameter.data, pattern, None, None):
                    _flip(bits, masks, pattern, parameter.dtype)

    def restore(self, slices: Mapping[int, Slice], team: Team) -> None:
        """Gives each value its bits back. slices: by a parameter's id, of those that have been cut."""
        for parameter, pattern in self._patterns.items():
            is_cut = parameter.shape != pattern.shape
            for bits, masks in _parts(parameter.data, pattern, slices[id(parameter)] if is_cut else None, team):
                _flip_back(bits, masks, pattern, parameter.dtype)
        self._patterns.clear()


def _free_exponent(values: torch.Tensor) -> int | None:
    """The one above the largest value's. An ordinary one for zeros alone; None for values without a number."""
    largest: int = 2 ** (values.element_size() * 8 - 1 - _FORMATS[values.dtype][1]) - 1  # of infinities
    top = 0
    for part in _rows(values):
        bits = part.view(_FORMATS[values.dtype][0]) & torch.iinfo(_FORMATS[values.dtype][0]).max
        top = max(top, int(bits.max()) >> _FORMATS[values.dtype][1])
    if top == 0:
        return largest // 2 - 3  # 1/8 to 1/4
    return top + 1 if top + 1 < largest else None


def _rows(values: torch.Tensor) -> Iterator[torch.Tensor]:
    values = values.unsqueeze(0) if values.dim() == 0 else values
    yield from values.split(max(1, _PART // max(1, values[0].numel())))


def _hashes(numbers: torch.Tensor, seed: int, mantissa: int) -> torch.Tensor:
    """A mask of a mantissa's upper bits for each number."""
    mixed = ((numbers + 0x1F123 * seed) * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    kept = min(mantissa, _HASHED)
    return ((mixed ^ (mixed >> 13)) & ((1 << kept) - 1)) << (mantissa - kept)


def _parts(
    values: torch.Tensor, pattern: _Pattern, slice_: Slice | None, team: Team | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(bits, their masks) of some rows at a time. slice_: the values are this rank's part. Padding has no mask."""
    integers, mantissa = _FORMATS[values.dtype]
    shape = pattern.shape or torch.Size((1,))
    axes, valid = [], None
    for dim, size in enumerate(shape):
        numbers = torch.arange(1, size + 1, device=values.device)
        if slice_ is not None and dim == slice_.dim % len(shape):
            assert team is not None
            numbers = Slice(0, slice_.blocks).cut(numbers, team)
            valid = (numbers > 0).view(-1, *(1,) * (len(shape) - 1 - dim))
        hashes = _hashes(numbers, 64 * pattern.number + dim, mantissa).to(integers)
        axes.append(hashes.view(-1, *(1,) * (len(shape) - 1 - dim)))
    begin = 0
    for part in _rows(values):
        end = begin + len(part)
        masks = axes[0][begin:end]
        for hashes in axes[1:]:
            masks = masks ^ hashes
        if valid is not None:
            masks = torch.where(valid[begin:end] if valid.dim() == len(shape) else valid, masks, 0)
        yield part.view(integers), masks
        begin = end


def _flip(bits: torch.Tensor, masks: torch.Tensor, pattern: _Pattern, dtype: torch.dtype) -> None:
    integers, mantissa = _FORMATS[dtype]
    if pattern.exponent is not None:
        is_zero = (bits & torch.iinfo(integers).max) == 0
        masks = torch.where(is_zero, masks | (pattern.exponent << mantissa), masks)
    bits.bitwise_xor_(masks)


def _flip_back(bits: torch.Tensor, masks: torch.Tensor, pattern: _Pattern, dtype: torch.dtype) -> None:
    integers, mantissa = _FORMATS[dtype]
    if pattern.exponent is not None:
        stands_for_zero = ((bits & torch.iinfo(integers).max) >> mantissa) == pattern.exponent
        masks = torch.where(stands_for_zero, masks | (pattern.exponent << mantissa), masks)
    bits.bitwise_xor_(masks)
