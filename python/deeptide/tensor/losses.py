# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits of which each rank has a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from deeptide.tensor.team import Team


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, size: int, team: Team) -> torch.Tensor:
        """The loss of each row, in fp32: (N, V / ranks), (N,) -> (N,). `size`: V; what is beyond is padding."""
        part = logits.shape[1]
        begin = team.index * part
        x = logits.float()
        if begin + part > size:
            padding = torch.arange(part, device=x.device) >= size - begin
            x = x.masked_fill(padding, float("-inf"))
        local = labels - begin
        here = (local >= 0) & (local < part)
        index = local.masked_fill(~here, 0)
        most = x.amax(1).clamp_min(torch.finfo(torch.float32).min)
        p = torch.exp(x - most.unsqueeze(1))
        wanted = x.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        told = team.core.all_gather(torch.stack([most, p.sum(1), wanted]), "forward")  # (ranks, 3, N)
        top = told[:, 0].amax(0)
        total = (told[:, 1] * torch.exp(told[:, 0] - top)).sum(0)
        p.mul_((torch.exp(most - top) / total).unsqueeze(1))
        ctx.save_for_backward(p, index, here)
        ctx.dtype = logits.dtype
        return torch.log(total) + top - told[:, 2].sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        p, index, here = ctx.saved_tensors
        result = p.scatter_add(1, index.unsqueeze(1), -here.to(p.dtype).unsqueeze(1))
        return (result * gradient.unsqueeze(1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    team: Team,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Computes torch's cross_entropy from a column-parallel head's own logits: no rank ever has those of all words.

    Shapes: logits (..., V / ranks), labels (...). vocabulary: V, where it does not divide among the ranks. Computes in
    fp32. reduction: "mean", over labels other than ignore_index, "sum" or "none".
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'vocab_parallel_cross_entropy: reduction: got {reduction!r}, expected "mean", "sum" or "none"'
        )
    size = vocabulary if vocabulary is not None else logits.shape[-1] * team.size
    flat = labels.reshape(-1)
    ignored = flat == ignore_index
    rows = logits.reshape(-1, logits.shape[-1])
    losses: torch.Tensor = _CrossEntropy.apply(rows, flat.masked_fill(ignored, 0), size, team)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


_parts = WeakTensorKeyDictionary()  # by the logits of all words: this rank's


def note_part(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Remembers the logits that were joined, as long as the joined ones live."""
    _parts[whole] = part


class CausalLoss:
    """Transformers' loss of a causal model, computed from each rank's own logits where it is given the head's output.

    So no rank takes all words' logits to fp32, nor has gradients of them.
    """

    def __init__(self, of_whole: Callable[..., torch.Tensor], team: Team) -> None:
        self.of_whole, self.team = of_whole, team

    @staticmethod
    def stands_in_for(loss: Any) -> bool:
        """Whether a model's loss_function is the one that this computes."""
        return getattr(loss, "__module__", "") == "transformers.loss.loss_utils" and loss.__name__ == "ForCausalLMLoss"

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Shapes: logits (batch, length, V), labels (batch, length) -> (). shift_labels: labels of the next words."""
        part = _parts.get(logits)
        if part is None or vocab_size != logits.shape[-1] or more.keys() & {"weight", "label_smoothing"}:
            counts = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self.of_whole(logits, labels, vocab_size, shift_labels=shift_labels, **counts, **more)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            part, shift_labels, self.team, vocabulary=vocab_size, ignore_index=ignore_index, reduction=reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
