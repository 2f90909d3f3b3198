# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small functions over tensors: what UtilsBuilder().load() gives, and deepspeed.runtime.zero.linear."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.nn import Linear as LinearModuleForZeroStage3
from torch.nn.functional import linear as zero3_linear_wrap

__all__ = [
    "LinearFunctionForZeroStage3",
    "LinearModuleForZeroStage3",
    "cast_to_byte_tensor",
    "flatten",
    "unflatten",
    "zero3_linear_wrap",
]


def cast_to_byte_tensor(given: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """The same memory as bytes, (N,): of one tensor, or of each in a list."""
    if isinstance(given, list):
        return [cast_to_byte_tensor(tensor) for tensor in given]  # type: ignore[misc]
    return given.flatten().view(torch.uint8)


class LinearFunctionForZeroStage3:
    """For code that calls apply(input, weight, bias) itself."""

    apply = staticmethod(zero3_linear_wrap)


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast_custom_fwd(*args: Any, **kwargs: Any) -> Any:
    """torch.amp.custom_fwd for this machine's device."""
    return functools.partial(torch.amp.custom_fwd, device_type=_kind())(*args, **kwargs)


def autocast_custom_bwd(*args: Any, **kwargs: Any) -> Any:
    """torch.amp.custom_bwd for this machine's device."""
    return functools.partial(torch.amp.custom_bwd, device_type=_kind())(*args, **kwargs)
