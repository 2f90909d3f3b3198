# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model of `make bench-gpu`, in plain torch: a decoder of GPT-2's or Llama's shape, checkpointed by block."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """A model, and the batch of one step."""

    layers: int
    width: int
    heads: int
    hidden: int  # of the MLP
    vocabulary: int
    context: int
    batch: int  # sequences
    gated: bool  # Llama's: RMSNorm, SwiGLU, rotary positions, no biases

    def flops_per_step(self):
        """Flops of forward and backward, as MFU counts them: 6 per matrix parameter and token, and causal attention."""
        mlp = (3 if self.gated else 2) * self.width * self.hidden
        matrices = self.layers * (4 * self.width**2 + mlp) + self.width * self.vocabulary
        attention = self.layers * self.context * self.width  # twice T d for scores and values, half of it masked
        return 6 * self.tokens_per_step() * (matrices + attention)

    def tokens_per_step(self):
        return self.batch * self.context


SHAPES = {
    "gpt2-xl": Shape(48, 1600, 25, 6400, 50304, 1024, 16, gated=False),
    "llama-7b": Shape(32, 4096, 32, 11008, 32000, 4096, 2, gated=True),
    "tiny": Shape(2, 64, 4, 128, 512, 64, 2, gated=True),  # to try the benchmark itself, on a CPU too
}


def _rotate(x_bhtd):
    half = x_bhtd.shape[-1] // 2
    steps = torch.arange(x_bhtd.shape[-2], device=x_bhtd.device)
    rates = 10000.0 ** (-torch.arange(half, device=x_bhtd.device) / half)
    angles = torch.outer(steps, rates)
    cos, sin = angles.cos().to(x_bhtd.dtype), angles.sin().to(x_bhtd.dtype)
    low, high = x_bhtd[..., :half], x_bhtd[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        norm, bias = (nn.RMSNorm, False) if shape.gated else (nn.LayerNorm, True)
        self.shape = shape
        self.attention_norm, self.mlp_norm = norm(shape.width), norm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=bias)
        self.projection = nn.Linear(shape.width, shape.width, bias=bias)
        self.mlp_in = nn.Linear(shape.width, (2 if shape.gated else 1) * shape.hidden, bias=bias)
        self.mlp_out = nn.Linear(shape.hidden, shape.width, bias=bias)

    def attention(self, x_btd):
        b, t, d = x_btd.shape
        q, k, v = self.qkv(x_btd).view(b, t, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        if self.shape.gated:
            q, k = _rotate(q), _rotate(k)
        mixed_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed_bhtd.transpose(1, 2).reshape(b, t, d))

    def mlp(self, x_btd):
        inner = self.mlp_in(x_btd)
        if self.shape.gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self.mlp_out(F.silu(gate) * inner)
        return self.mlp_out(F.gelu(inner, approximate="tanh"))

    def forward(self, x_btd):
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        return x_btd + self.mlp(self.mlp_norm(x_btd))


class Decoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x_bt, y_bt):
        """Mean cross-entropy, in fp32."""
        hidden_btd = self.tokens(x_bt)
        if self.positions is not None:
            hidden_btd = hidden_btd + self.positions.weight[: x_bt.shape[1]]
        for block in self.blocks:
            hidden_btd = checkpoint(block, hidden_btd, use_reentrant=False)
        logits_btv = self.head(self.norm(hidden_btd))
        return F.cross_entropy(logits_btv.flatten(0, 1).float(), y_bt.flatten())
