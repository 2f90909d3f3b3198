# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the blocks of a layout: the operator, and DeepSpeed's modules around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

import deeptide._C  # noqa: F401  registers torch.ops.deeptide
from deeptide.ops.sparse_attention.layouts import FixedSparsityConfig, SparsityConfig

_MODES = {"add": False, "mul": True}


def _multiplies(name: str, mode: str) -> bool:
    if mode not in _MODES:
        raise ValueError(f"{name} is {mode!r}, expected 'add' or 'mul'")
    return _MODES[mode]


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    block: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "mul",
) -> Tensor:
    """Attention over the blocks of `layout` alone; a position that attends to nothing gets zeros.

    Args:
        query: (N, H, S, D), of any floating type. Scores and softmax are fp32 at least.
        key: as query.
        value: as query.
        layout: (H, S / block, S / block), 1 where blocks attend, as SparsityConfig.make_layout returns.
        block: elements of a block's side.
        scale: of the scores; 1 / sqrt(D) by default.
        causal: whether positions attend to none after them, within blocks too.
        rpe: added to the scaled scores; broadcasts to (N, H, S, S); has a gradient.
        key_padding_mask: (N, S), without a gradient.
        attn_mask: (S, S), without a gradient.
        key_padding_mask_mode: "add": added to the scores; "mul": where it is 0, a score does not count.
        attn_mask_mode: likewise.

    Returns (N, H, S, D). Errors: ValueError for sizes and types that do not fit.

    """
    return torch.ops.deeptide.sparse_attention(
        query,
        key,
        value,
        layout,
        block,
        scale,
        causal,
        rpe,
        key_padding_mask,
        attn_mask,
        _multiplies("key_padding_mask_mode", key_padding_mask_mode),
        _multiplies("attn_mask_mode", attn_mask_mode),
    )


def block_mask(layout: Tensor, block: int, causal: bool = False) -> BlockMask:
    """Makes the mask for torch's `flex_attention` that attends as `sparse_attention` does.

    Args:
        layout: (H, S / block, S / block), on the device of the queries.
        block: elements of a block's side.
        causal: whether positions attend to none after them, within blocks too.

    Compile `flex_attention`: uncompiled it computes all S x S scores. Sources: docs/measurements.md for when it is
    faster; torch.nn.attention.flex_attention.

    """
    allowed = layout.bool()
    side = torch.arange(layout.size(1), device=layout.device)
    part = allowed & (side[:, None] == side) if causal else torch.zeros_like(allowed)
    whole = allowed & ((side[:, None] > side) if causal else True)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = allowed[head, query // block, key // block]
        return found & (query >= key) if causal else found

    def blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)
        return mask.sum(-1, dtype=torch.int32)[None], order.int()[None]

    length = layout.size(1) * block
    return BlockMask.from_kv_blocks(
        *blocks(part), *blocks(whole), BLOCK_SIZE=block, mask_mod=attends, seq_lengths=(length, length)
    )


class SparseSelfAttention(nn.Module):
    """Self-attention over the blocks of a layout; fp32, bf16 and fp16.

    Args:
        sparsity_config: the layout.
        key_padding_mask_mode, attn_mask_mode: as of `sparse_attention`.
        max_seq_length: longest sequence; a shorter one has the first blocks of this length's layout.

    Where torch.distributed has a group, the first forward takes rank 0's layout, since random blocks may differ.

    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        _multiplies("key_padding_mask_mode", key_padding_mask_mode)
        _multiplies("attn_mask_mode", attn_mask_mode)
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.register_buffer("master_layout", self.sparsity_config.make_layout(max_seq_length))
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self._is_rank_0s = False

    def get_layout(self, L: int) -> Tensor:  # noqa: N803  DeepSpeed's name
        """Returns the layout (H, L / block, L / block) in CPU memory. Errors: ValueError if L does not fit."""
        if not self._is_rank_0s and dist.is_available() and dist.is_initialized():
            layouts = [self.master_layout.cpu()]
            dist.broadcast_object_list(layouts, src=0)  # whatever devices the group's backend takes
            self.master_layout.copy_(layouts[0])
            self._is_rank_0s = True
        block = self.sparsity_config.block
        if L % block != 0:
            raise ValueError(f"the sequence's length is {L}, expected a multiple of the block, {block}")
        side = L // block
        if side > self.master_layout.size(1):
            longest = self.master_layout.size(1) * block
            raise ValueError(f"the sequence's length is {L}, expected at most max_seq_length, {longest}")
        return self.master_layout[:, :side, :side].cpu()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attends. Shapes: query, value (N, H, S, D), key this or (N, H, D, S) -> (N, H, S, D).

        Masks may have further dimensions of size 1, as (N, 1, 1, S).
        """
        length = query.size(2)
        if key.size(2) != length:
            key = key.transpose(2, 3)
        if query.shape != key.shape or query.shape != value.shape:
            raise NotImplementedError(
                f"query, key and value are {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}, expected "
                "one shape: sparse attention is self-attention"
            )
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(query.size(0), length)
        if attn_mask is not None:
            attn_mask = attn_mask.reshape(length, length)
        return sparse_attention(
            query,
            key,
            value,
            self.get_layout(length),
            self.sparsity_config.block,
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
        )


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with a layout, for models whose attention takes (hidden_states, attention_mask).

    Args:
        config: the model's: hidden_size, num_attention_heads, max_position_embeddings if it has one.
        sparsity_config: the layout.

    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        if width % heads != 0:
            raise ValueError(f"hidden_size is {width}, expected a multiple of num_attention_heads, {heads}")
        self.num_attention_heads = heads
        self.attention_head_size = width // heads
        self.all_head_size = width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        chosen = sparsity_config or FixedSparsityConfig(num_heads=heads)
        longest = max(2048, getattr(config, "max_position_embeddings", 0) // chosen.block * chosen.block)
        self.sparse_self_attention = SparseSelfAttention(chosen, max_seq_length=longest)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """(N, S, H D) -> (N, H, S, D)."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attends. Shapes: hidden_states (N, S, H D), attention_mask (N, 1, 1, S) or (N, S), added to the scores."""
        query, key, value = (
            self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value)
        )
        context = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)
