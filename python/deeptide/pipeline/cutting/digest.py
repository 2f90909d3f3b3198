# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A number for what all stages must have alike: some elements of each tensor, shapes, and Python's plain values."""

from __future__ import annotations

import zlib
from typing import Any

import torch

_PER_AXIS = 16  # elements that are looked at, about


def _of_tensor(tensor: torch.Tensor, held: int, with_floats: bool) -> int:
    held = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), held)
    if tensor.layout is not torch.strided or (tensor.is_floating_point() and not with_floats):
        return held
    some = tensor.detach()[tuple(slice(None, None, max(1, size // _PER_AXIS)) for size in tensor.shape)]
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
