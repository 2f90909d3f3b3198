# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The task, the same for all contenders: initial weights, batches and torch's optimizer."""

import torch

from model import GPT, SmallLayers
from settings import BETAS, EPSILON, SEED, WEIGHT_DECAY


def make_model(size):
    torch.manual_seed(SEED)
    return GPT(size) if size.heads else SmallLayers(size)


def make_batches(size, rank):
    """Two batches, taken in turn: random data seen again, so the loss falls and a wrong update shows in it."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    if not size.heads:
        return list(torch.randn(2, 2, size.batch, size.width, generator=generator))
    tokens = torch.randint(size.vocabulary, (2, size.batch, size.context + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def fused_adamw(parameters, size):
    """Torch's fastest AdamW on a CPU; its default one is several times slower there."""
    return torch.optim.AdamW(
        parameters, lr=size.learning_rate, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
