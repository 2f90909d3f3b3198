# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A GPT of a given size, for plans: built under zero.Init, it has neither memory nor values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def _undrawn(kind: Any, *sizes: int) -> Any:
    """A layer without values: drawing them would take as long as for a real model."""
    return nn.utils.skip_init(kind, *sizes)


class Attention(nn.Module):
    """Causal attention over all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (_undrawn(nn.Linear, width, width) for _ in range(3))
        self.out_proj = _undrawn(nn.Linear, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length, width) -> the same."""
        parts = (project(x).unflatten(-1, (self.num_heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a network four times as wide, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.fc1, self.fc2 = _undrawn(nn.Linear, width, 4 * width), _undrawn(nn.Linear, 4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length, width) -> the same."""
        x = x + self.attention(self.norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.network_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder with a tied head: vocabulary * width + layers * (12 width + 13) * width + 2 width parameters."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = _undrawn(nn.Embedding, vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.in_features, self.head.out_features = width, vocabulary
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Embedding:
        """The words' vectors, as models of Transformers name them: ranks that share layers cut them."""
        return self.embedding  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss. Shapes: (batch, length) each."""
        x = self.embedding(input_ids)
        for block in self.layers:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


# Layers of published models, by the most parameters that they have.
_DEPTHS = {
    350e6: 12,
    1.5e9: 24,
    10e9: 32,
    20e9: 40,
    50e9: 48,
    100e9: 80,
}


def layers_for(parameters: int) -> int:
    """The layers that published models of about so many parameters have."""
    return next((layers for most, layers in _DEPTHS.items() if parameters <= most), 96)


def width_for(parameters: int, layers: int, vocabulary: int) -> int:
    """The width, a multiple of 64, whose GPT is nearest to so many parameters."""

    def count(width: int) -> int:
        return vocabulary * width + layers * (12 * width + 13) * width + 2 * width

    width = 64
    while count(width + 64) <= parameters:
        width += 64
    return min((width, width + 64), key=lambda each: abs(count(each) - parameters))


def heads_for(width: int) -> int:
    """Heads of 128 elements, or of 64 where these do not divide the width."""
    return width // 128 if width % 128 == 0 else max(width // 64, 1)
