# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values rounded to few bits and kept in their type, masks of the largest values, gradients that pass both.

Shapes: a tensor is cut into G groups of as many elements each, in order; each group has a scale of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def straight_through(source: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes to `source` as it is. Shapes: alike."""
    passed: Tensor = _StraightThrough.apply(source, value)  # type: ignore[no-untyped-call]
    return passed


def quantize_symmetric(
    x: Tensor, bits: int, groups: int = 1, noise: Tensor | None = None, bound: Tensor | None = None
) -> Tensor:
    """Multiples of a scale from -2^(bits - 1) to 2^(bits - 1) - 1; a group of zeros stays.

    `bound`: the largest magnitude, else each group's own. `noise`: added before rounding, shape (G, numel / G).
    """
    levels = 2**bits
    flat = x.reshape(groups, -1)
    scale = 2 * (flat.abs().amax(dim=-1, keepdim=True) if bound is None else bound) / levels
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    steps = flat / scale
    steps = (steps if noise is None else steps + noise).round().clamp(-(levels // 2), levels // 2 - 1)
    return (steps * scale).reshape(x.shape)


def quantize_asymmetric(
    x: Tensor,
    bits: int,
    groups: int = 1,
    noise: Tensor | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """2^bits levels from the smallest value on; a group of equal values stays. `low`, `high`: the range, if given."""
    levels = 2**bits
    flat = x.reshape(groups, -1)
    low = flat.amin(dim=-1, keepdim=True) if low is None else low
    high = flat.amax(dim=-1, keepdim=True) if high is None else high
    scale = (high - low) / levels
    magnitude = low.abs()  # of equal values: one step of their own size reaches them
    scale = torch.where(scale == 0, torch.where(magnitude == 0, torch.ones_like(scale), magnitude), scale)
    zero_point = (low / scale).round() * scale
    steps = (flat - zero_point) / scale
    steps = (steps if noise is None else steps + noise).round().clamp(0, levels - 1)
    return (steps * scale + zero_point).reshape(x.shape)


def quantize_ternary(x: Tensor, groups: int = 1) -> Tensor:
    """-a, 0 or a: 0 up to 0.7 of the group's mean magnitude, a the mean magnitude above. Source: arXiv:1605.04711."""
    flat = x.reshape(groups, -1)
    threshold = (0.7 * flat.norm(p=1, dim=1).div(flat.size(1))).view(-1, 1)
    large = (flat.abs() > threshold).to(x.dtype)
    count = large.sum(dim=1)
    alpha = ((large * flat).abs().sum(dim=1) / torch.where(count == 0, torch.ones_like(count), count)).view(-1, 1)
    rounded: Tensor = alpha * (flat > threshold).to(x.dtype) - alpha * (flat < -threshold).to(x.dtype)
    return rounded.reshape(x.shape)


def quantize_binary(x: Tensor, groups: int = 1) -> Tensor:
    """The sign times the group's mean magnitude. Source: arXiv:1603.05279."""
    flat = x.reshape(groups, -1)
    magnitude: Tensor = flat.norm(p=1, dim=1, keepdim=True).div(flat.size(1))
    return flat.sign().mul(magnitude).reshape(x.shape)


def quantize(x: Tensor, bits: int, groups: int = 1, symmetric: bool = True, noise: Tensor | None = None) -> Tensor:
    """X rounded to `bits`: 2 is ternary, 1 binary, which know neither asymmetric ranges nor noise."""
    if bits == 1:
        return quantize_binary(x, groups)
    if bits == 2:
        return quantize_ternary(x, groups)
    if symmetric:
        return quantize_symmetric(x, bits, groups, noise)
    return quantize_asymmetric(x, bits, groups, noise)


def largest(scores: Tensor, share: float) -> Tensor:
    """True at the ceil(share * numel) largest scores, in the shape of `scores`."""
    order = scores.detach().flatten().sort(descending=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[: math.ceil(share * scores.numel())]] = True
    return mask.view(scores.shape)
