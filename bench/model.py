# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model that every contender trains: a GPT of 46 M parameters in plain torch, knowing no framework."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 8192
CONTEXT = 128
WIDTH = 512
LAYERS = 12
HEADS = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x_btd):
        b, t, d = x_btd.shape
        q, k, v = self.qkv(x_btd).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed_bhtd.transpose(1, 2).reshape(b, t, d))

    def forward(self, x_btd):
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        return x_btd + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_btd))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
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
