# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Changes one layer: its weight quantised, its input quantised, parts of its weight left out."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from deeptide.compression.quantizers import (
    largest,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
    straight_through,
)

MOMENTUM = 0.95  # of the range of static calibration


@dataclasses.dataclass
class WeightQuantization:
    """How a layer's weight is rounded. With `in_forward`, to the target's bits; else the bits fall over the steps."""

    bits: int
    target_bits: int
    period: int
    groups: int
    symmetric: bool
    stochastic: bool
    in_forward: bool
    offset: int
    number: int  # of the layer, for its noise
    on: bool = False
    share_kept: float = 0.0  # of the weight as it is, in a mixture
    draws: int = 0  # optimizer steps for which noise was drawn

    def values(self, weight: Tensor) -> Tensor:
        """The weight, rounded."""
        with torch.no_grad():
            noise = None
            if self.stochastic and self.bits > 2:
                noise = self._noise(weight)
            rounded = quantize(weight, self.bits, self.groups, self.symmetric, noise)
            if self.share_kept:
                rounded = self.share_kept * weight + (1 - self.share_kept) * rounded
            return rounded

    def _noise(self, weight: Tensor) -> Tensor:
        # The same on every rank, in every forward of a step, in a recomputation and after a resume.
        generator = torch.Generator(weight.device).manual_seed(self.draws * 1_000_003 + self.number)
        noise = torch.empty(self.groups, weight.numel() // self.groups, dtype=weight.dtype, device=weight.device)
        return noise.uniform_(-0.5, 0.5, generator=generator)


class ActivationRange(nn.Module):
    """The range of a layer's inputs, a moving average while training. A checkpoint keeps it."""

    x_min_max: Tensor

    def __init__(self, like: Tensor, momentum: float = MOMENTUM) -> None:
        super().__init__()
        self._momentum = momentum
        self.register_buffer("x_min_max", torch.zeros(2, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(lowest, highest), in the type of x."""
        if self.training:
            with torch.no_grad():
                seen = torch.stack([x.min(), x.max()])
                begins = self.x_min_max[0] == self.x_min_max[1]
                before = torch.where(begins, seen.to(self.x_min_max.dtype), self.x_min_max)
                self.x_min_max.copy_(before * self._momentum + seen * (1 - self._momentum))
        low, high = self.x_min_max.to(x.dtype, copy=True).unbind()
        return low, high


@dataclasses.dataclass
class ActivationQuantization:
    """How a layer's input is rounded: by a range of its own for each token (each image), or by one range."""

    bits: int
    symmetric: bool
    static: bool
    offset: int
    on: bool = False

    def values(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The input, rounded; its gradient passes as it is."""
        if self.static:
            low, high = layer.activation_quantizer(x)  # type: ignore[operator]
            with torch.no_grad():
                if self.symmetric:
                    rounded = quantize_symmetric(x, self.bits, bound=torch.maximum(low.abs(), high))
                else:
                    rounded = quantize_asymmetric(x, self.bits, low=low, high=high)
            return straight_through(x, rounded)
        groups = x.size(0) if isinstance(layer, nn.Conv2d) else x.numel() // max(x.size(-1), 1)
        with torch.no_grad():
            rounded = (quantize_symmetric if self.symmetric else quantize_asymmetric)(x, self.bits, groups)
        return straight_through(x, rounded)


# DeepSpeed's names of what a technique adds to a layer: (buffer of the mask, parameter of the scores).
NAMES = {
    "sparse_pruning": ("sparse_pruning_mask", "sparse_mask_scores"),
    "row_pruning": ("row_pruning_mask", "row_mask_scores"),
    "head_pruning": ("head_pruning_mask", "head_pruning_scores"),
    "channel_pruning": ("channel_pruning_mask", "channel_mask_scores"),
}


@dataclasses.dataclass
class Pruning:
    """Which part of a layer's weight stays: the largest by magnitude, or by scores that are trained ("topk")."""

    technique: str
    scored: bool
    share: float
    offset: int
    heads: int = 0
    on: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether the mask is one of outputs, which applies to the bias too."""
        return self.technique in ("row_pruning", "channel_pruning")

    def prepare(self, layer: nn.Module) -> None:
        """Adds the mask or the scores to the layer."""
        mask_name, scores_name = NAMES[self.technique]
        weight: Tensor = layer.weight  # type: ignore[assignment]
        outputs = (weight.size(0), *[1] * (weight.dim() - 1))
        if self.scored:
            shape = {"sparse_pruning": weight.shape, "head_pruning": (1, self.heads)}.get(self.technique, outputs)
            scores = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            nn.init.kaiming_uniform_(scores, a=math.sqrt(5))
            layer.register_parameter(scores_name, scores)
            return
        with torch.no_grad():
            magnitude = weight.detach()
            if self.technique == "sparse_pruning":
                magnitude = magnitude.abs()
            else:
                magnitude = torch.linalg.vector_norm(magnitude, ord=1, dim=tuple(range(1, weight.dim()))).view(outputs)
            layer.register_buffer(mask_name, largest(magnitude, self.share))

    def mask(self, layer: nn.Module) -> Tensor:
        """The mask of what stays: of weights, of outputs (N, 1, …) or of heads (1, H). A gradient goes to scores."""
        mask_name, scores_name = NAMES[self.technique]
        if not self.scored:
            kept: Tensor = getattr(layer, mask_name)
            return kept
        scores: Tensor = getattr(layer, scores_name)
        with torch.no_grad():
            kept = largest(scores, self.share).to(scores.dtype)
        return straight_through(scores, kept)

    def values(self, layer: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias, with zeros in place of what is left out."""
        mask = self.mask(layer)
        if self.technique == "head_pruning":
            mask = mask.repeat_interleave(weight.size(1) // self.heads, dim=1)
        if bias is not None and self.has_bias:
            bias = bias * mask.view(-1)
        return weight * mask, bias

    def forget(self, layer: nn.Module) -> None:
        """Takes the mask or the scores away from the layer."""
        delattr(layer, NAMES[self.technique][1 if self.scored else 0])
