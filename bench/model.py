# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The models that every contender trains, in plain torch, knowing no framework: a GPT, and one of many small layers."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def attention(self, x_btd):
        b, t, d = x_btd.shape
        q, k, v = self.qkv(x_btd).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed_bhtd.transpose(1, 2).reshape(b, t, d))

    def forward(self, x_btd):
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        return x_btd + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_btd))))


class GPT(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x_bt, y_bt):
        """Mean cross-entropy, in fp32 whatever the weights are: bf16 resolves a loss of 9 to 0.06 only."""
        hidden_btd = self.tokens(x_bt) + self.positions(torch.arange(x_bt.shape[1]))
        for block in self.blocks:
            hidden_btd = block(hidden_btd)
        logits_btv = self.head(self.norm(hidden_btd))
        return F.cross_entropy(logits_btv.flatten(0, 1).float(), y_bt.flatten())


class SmallLayers(nn.Module):
    """Hundreds of small linear layers: what a framework costs for each parameter, operator and unit shows here."""

    def __init__(self, size):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.layers))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=0.002)
            nn.init.zeros_(block.bias)

    def forward(self, x_bd, y_bd):
        """Mean squared error. Layers that each add a little keep values and gradients at one scale: no denormals."""
        x_bd = x_bd.to(self.blocks[0].weight.dtype)
        for block in self.blocks:
            x_bd = x_bd + F.gelu(block(x_bd))
        return F.mse_loss(x_bd.float(), y_bd)
