# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT that knows nothing of ranks or shards, with Deeptide's faster operators. model.cc is its twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeptide import ops

# Shapes: B windows in a batch, T bytes in a window, D width, H heads, K = D / H, V = 256 byte values.


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 256
    context: int = 256
    width: int = 192
    layers: int = 4
    heads: int = 4


def rotary_table(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, K / 2) of the angles by which position turns each pair of a head's numbers."""
    half = head_width // 2
    speeds = 10000.0 ** (torch.arange(half, device=device) / -half)
    angles = torch.arange(length, device=device)[:, None] * speeds
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, H, T, K), with the table in x's type."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return ops.linear(x, layer.weight, layer.bias)


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return ops.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def residual_norm(layer: nn.LayerNorm, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x + branch, and x + branch."""
    return ops.residual_layer_norm(x, branch, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in linear(self.qkv, x).split(width, dim=2)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = ops.attention(q, k, v, causal=True)
        return linear(self.proj, y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.proj, ops.gelu_tanh(linear(self.fc, x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y, x = residual_norm(self.ln_2, x, self.attn(norm(self.ln_1, x), cos, sin))
        return x + self.mlp(y)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig = GPTConfig(), seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """The same numbers in both languages: one generator, drawn from in the order of the parameters."""
        torch.manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name or name.startswith("ln_f"):
                parameter.fill_(1.0)
            else:
                residual = name.endswith("proj.weight")  # each block adds two of them to the stream
                parameter.normal_(0.0, 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, D)."""
        x = self.wte(tokens)
        table = rotary_table(tokens.shape[1], self.config.width // self.config.heads, tokens.device)
        cos, sin = (part.to(x.dtype) for part in table)
        for block in self.h:
            x = block(x, cos, sin)
        return norm(self.ln_f, x)

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, V). The output layer is the embedding, used a second time."""
        return ops.linear(self.hidden(tokens), self.wte.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats per byte."""
        return ops.linear_cross_entropy(self.hidden(tokens).flatten(0, 1), self.wte.weight, targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """`count` more bytes. Every rank must take part when the parameters are sharded; all draw the same bytes."""
        device = self.wte.weight.device
        generator = torch.Generator().manual_seed(seed)
        text, context = list(prompt), self.config.context
        for _ in range(count):
            window = text[-context:]
            # Always of full length, since oneDNN keeps memory for each length it meets; what follows is not seen.
            padded = torch.tensor([window + [0] * (context - len(window))], device=device)
            logits = self.logits(padded)[0, len(window) - 1].float().cpu()
            text.append(int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)))
        return bytes(text)
