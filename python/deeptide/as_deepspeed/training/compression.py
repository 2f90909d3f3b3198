# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of DeepSpeed's compression that scripts call by themselves: quantizers, and its layers for isinstance."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from deeptide.as_deepspeed import NotSupportedError
from deeptide.compression.layers import CompressedConv2d, CompressedEmbedding, CompressedLinear
from deeptide.compression.quantizers import (
    largest,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
    straight_through,
)
from deeptide.compression.techniques import MOMENTUM, ActivationRange

_End: TypeAlias = Tensor | float | None


def _range_of(low: _End, high: _End, groups: int) -> tuple[Tensor, Tensor] | None:
    """The ends that a caller gave. Errors: ValueError for one end, or for a range of several groups."""
    if low is None and high is None:
        return None
    if low is None or high is None or groups != 1:
        raise ValueError(
            f"min_value={low}, max_value={high} with num_groups={groups}: expected both ends and one group, or no end"
        )
    return torch.as_tensor(low), torch.as_tensor(high)


class SymQuantizer:
    """Rounds to 2^num_bits levels around zero, in num_groups equal parts; the gradient passes. Shapes: as x."""

    @staticmethod
    def apply(x: Tensor, num_bits: int, min_value: _End = None, max_value: _End = None, num_groups: int = 1) -> Tensor:
        """x, rounded; by the larger end of a range that is given. Errors: ValueError for half a range."""
        ends = _range_of(min_value, max_value, num_groups)
        bound = None if ends is None else torch.maximum(ends[0].abs(), ends[1]).view(-1)
        return straight_through(x, quantize_symmetric(x.detach(), num_bits, num_groups, bound=bound))


class AsymQuantizer:
    """Rounds to 2^num_bits levels from the least value on, in num_groups equal parts; the gradient passes."""

    @staticmethod
    def apply(x: Tensor, num_bits: int, min_value: _End = None, max_value: _End = None, num_groups: int = 1) -> Tensor:
        """x, rounded; within a range that is given. Errors: ValueError for half a range."""
        low, high = _range_of(min_value, max_value, num_groups) or (None, None)
        return straight_through(x, quantize_asymmetric(x.detach(), num_bits, num_groups, low=low, high=high))


class TernaryQuantizer:
    """Rounds to -a, 0 or a, in num_groups equal parts; the gradient passes. Shapes: as x."""

    @staticmethod
    def apply(x: Tensor, num_bits: int, min_value: None = None, max_value: None = None, num_groups: int = 1) -> Tensor:
        """x, rounded, whatever num_bits is."""
        return straight_through(x, quantize(x.detach(), 2, num_groups))


class BinaryQuantizer:
    """Rounds to the sign times a mean, in num_groups equal parts; the gradient passes. Shapes: as x."""

    @staticmethod
    def apply(x: Tensor, num_bits: int, min_value: None = None, max_value: None = None, num_groups: int = 1) -> Tensor:
        """x, rounded, whatever num_bits is."""
        return straight_through(x, quantize(x.detach(), 1, num_groups))


class TopKBinarizer:
    """1 at the largest scores, 0 elsewhere; the gradient of the mask goes to the scores. Shapes: as the scores."""

    @staticmethod
    def apply(inputs: Tensor, threshold: Any, sigmoid: bool) -> Tensor:
        """`threshold`: the share that stays, or with `sigmoid` a tensor whose sigmoid it is, which is trained too."""
        share = torch.sigmoid(threshold).item() if sigmoid else float(threshold)
        kept = largest(inputs, share).to(inputs.dtype)
        mask = straight_through(inputs, kept)
        return mask + kept * (threshold - threshold.detach()) if sigmoid else mask


class QuantAct(ActivationRange):
    """Rounds by a range that follows the inputs while it trains. A state dict keeps it as x_min_max."""

    def __init__(self, act_range_momentum: float = MOMENTUM, quant_mode: str = "symmetric") -> None:
        super().__init__(torch.zeros(()), act_range_momentum)
        self.act_function = SymQuantizer.apply if quant_mode == "symmetric" else AsymQuantizer.apply

    def forward(self, x: Tensor, num_bits: int, *args: object) -> Tensor:  # type: ignore[override]
        """X in num_bits, its gradient as it is. Further arguments are ignored."""
        low, high = super().forward(x)
        return self.act_function(x, num_bits, low, high)


class _Kind(type):
    """The type of a class that layers are instances of once init_compression has prepared them; it makes none."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.ours)  # type: ignore[attr-defined]

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotSupportedError(f"{cls.__name__}(…): init_compression makes compressed layers of torch's own")


class LinearLayer_Compress(metaclass=_Kind):  # noqa: N801
    """For isinstance: a compressed torch.nn.Linear."""

    ours = CompressedLinear


class Conv2dLayer_Compress(metaclass=_Kind):  # noqa: N801
    """For isinstance: a compressed torch.nn.Conv2d."""

    ours = CompressedConv2d


class Embedding_Compress(metaclass=_Kind):  # noqa: N801
    """For isinstance: a compressed torch.nn.Embedding."""

    ours = CompressedEmbedding


def is_module_compressible(module: nn.Module, mpu: object = None) -> bool:
    """Whether a technique could change the module or shrink it along with another one."""
    return isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, nn.BatchNorm2d))
