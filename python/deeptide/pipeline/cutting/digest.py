# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers for what all stages must have alike: values of tensors, shapes, and Python's plain values."""

from __future__ import annotations

import zlib
from collections.abc import Container
from typing import Any

import torch

_PER_AXIS = 16  # elements of a large tensor that are looked at, about
_LARGE_BYTES = 1 << 20
_BEYOND = 64.0  # a mask's least value would hide all others in a sum
_ROUNDING = {torch.bfloat16: 1e-4, torch.float16: 1e-4}  # of sums over a tensor, on machines that round otherwise
_LEAST_ROUNDING = 1e-6


def _of_tensor(tensor: torch.Tensor, held: int, with_floats: bool) -> int:
    held = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), held)
    if tensor.layout is not torch.strided or (tensor.is_floating_point() and not with_floats):
        return held
    some = tensor.detach()
    if tensor.numel() * tensor.element_size() > _LARGE_BYTES:
        if not tensor.is_floating_point():
            held = zlib.crc32(str(int(some.sum())).encode(), held)
        some = some[tuple(slice(None, None, max(1, size // _PER_AXIS)) for size in tensor.shape)]
    return zlib.crc32(some.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), held)


def digest(value: Any, with_floats: bool, held: int = 0) -> int:
    """32 bits. Without `with_floats`, floating tensors count by their shapes alone: machines may round otherwise."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, held, with_floats)
    if isinstance(value, (tuple, list)):
        for item in value:
            held = digest(item, with_floats, held)
    elif isinstance(value, dict):
        for key, item in value.items():
            held = digest(item, with_floats, zlib.crc32(str(key).encode(), held))
    elif value is None or isinstance(value, (bool, int, float, str)):
        held = zlib.crc32(repr(value).encode(), held)
    return held


def sums_of(tensors: list[torch.Tensor], travelling: Container[int]) -> list[float]:
    """Sums over the floating ones that do not travel, by id: of values, of absolute values, and how much may differ."""
    total = size = 0.0
    rounding = _LEAST_ROUNDING
    for place, tensor in enumerate(tensors):
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or id(tensor) in travelling:
            continue
        near = torch.nan_to_num(tensor.detach().float(), nan=_BEYOND / 2).clamp_(-_BEYOND, _BEYOND)
        weight = 1 + place / 7  # so that two tensors cannot change places
        total += weight * near.sum(dtype=torch.float64).item()
        size += weight * near.abs_().sum(dtype=torch.float64).item()
        rounding = max(rounding, _ROUNDING.get(tensor.dtype, 0.0))
    return [total, size, rounding * size]


def are_alike(one: list[float], other: list[float]) -> bool:
    """Whether two results of `sums_of` are of the same values, but for rounding."""
    return all(abs(a - b) <= max(one[2], other[2]) for a, b in zip(one[:2], other[:2], strict=True))
