# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values rounded to few bits and kept in their type, masks of the largest values, gradients that pass both.

Shapes: a tensor is cut into G groups of as many elements each, in order; each group has a scale of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

import deeptide._C  # noqa: F401  registers torch.ops.deeptide


def straight_through(source: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes to `source` as it is. Shapes: alike."""
    passed: Tensor = torch.ops.deeptide.straight_through(source, value)
    return passed


def quantize_symmetric(x: Tensor, bits: int, groups: int = 1, bound: Tensor | None = None) -> Tensor:
    """Multiples of a scale from -2^(bits - 1) to 2^(bits - 1) - 1; a group of zeros stays.

    `bound`: the largest magnitude, else each group's own.
    """
    rounded: Tensor = torch.ops.deeptide.quantize_symmetric(x, bits, groups, None, bound)
    return rounded


def quantize_asymmetric(
    x: Tensor, bits: int, groups: int = 1, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    """2^bits levels from the smallest value on; a group of equal values stays. `low`, `high`: the range, if given."""
    rounded: Tensor = torch.ops.deeptide.quantize_asymmetric(x, bits, groups, None, low, high)
    return rounded


def quantize(x: Tensor, bits: int, groups: int = 1, symmetric: bool = True, noise: Tensor | None = None) -> Tensor:
    """X rounded to `bits`: 2 is ternary, 1 binary, which know neither asymmetric ranges nor noise.

    `noise`: added before rounding, shape (G, numel / G).
    """
    rounded: Tensor = torch.ops.deeptide.quantize(x, bits, groups, symmetric, noise)
    return rounded


def largest(scores: Tensor, share: float) -> Tensor:
    """True at the ceil(share * numel) largest scores, in the shape of `scores`."""
    mask: Tensor = torch.ops.deeptide.largest_mask(scores, share)
    return mask
