# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Operators that are faster than torch's on a CPU; elsewhere, and for other types, they are torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import deeptide._C  # noqa: F401  registers torch.ops.deeptide

__all__ = [
    "attention",
    "cross_entropy",
    "gelu_tanh",
    "labelled_rows",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "residual_layer_norm",
]

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(name: str) -> int:
    if name not in _REDUCTIONS:
        raise ValueError(f"reduction is {name!r}, expected one of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear; in fp32 by oneDNN where torch's BLAS leaves AVX-512 unused (AMD)."""
    return torch.ops.deeptide.linear(input, weight, bias)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention without dropout.

    Shapes: query (N, H, R, D), key and value (N, H, C, D), mask expandable to (N, H, R, C) -> (N, H, R, D). Faster
    for bf16 and up to 1024 keys where the processor multiplies bf16; scores are bf16 then, and made again in backward.
    """
    return torch.ops.deeptide.attention(query, key, value, mask, causal, scale)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """torch.nn.functional.cross_entropy of (N, V) logits and (N,) classes, in fp32 for bf16 logits too."""
    return torch.ops.deeptide.cross_entropy(logits, targets, ignore_index, _reduction(reduction), label_smoothing)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """cross_entropy(linear(hidden, weight, bias), targets), with at most 32 MiB of logits at a time, on a GPU 256 MiB.

    Shapes: hidden (N, D), weight (V, D), targets (N,), bias (V,) -> a scalar. fp16 and double take torch's
    own operators. On the CPU, rows whose target is ignore_index are left out of every product, forward and backward.
    """
    return torch.ops.deeptide.linear_cross_entropy(
        hidden, weight, targets, ignore_index, _reduction(reduction), label_smoothing, bias
    )


def labelled_rows(hidden: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The hidden states that have a label, and their labels, so that a head sees no others: a masked-language model's.

    Shapes: hidden (…, D), labels (…) -> (M, D), (M,), in the order of the rows. Their gradient goes back to the places
    they came from; other places get zeros.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labelled_rows: labels have shape {list(labels.shape)}, expected {list(hidden.shape[:-1])}, one for each "
            f"hidden state of {list(hidden.shape)}"
        )
    rows = (labels.flatten() != ignore_index).nonzero().squeeze(1)
    return hidden.flatten(0, -2).index_select(0, rows), labels.flatten().index_select(0, rows)


def gelu_tanh(x: Tensor) -> Tensor:
    """torch.nn.functional.gelu(x, approximate="tanh")."""
    return torch.ops.deeptide.gelu_tanh(x)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm."""
    return torch.ops.deeptide.layer_norm(x, normalized_shape, weight, bias, eps)


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual), and x + residual itself, in one pass."""
    return torch.ops.deeptide.residual_layer_norm(x, residual, normalized_shape, weight, bias, eps)
