# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The task, the same for all contenders: initial weights, batches and torch's optimizer."""

import torch

from model import CONTEXT, GPT, VOCABULARY
from settings import BATCH, BETAS, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY


def make_model():
    torch.manual_seed(SEED)
    return GPT()


def make_batches(rank):
    """Two batches, taken in turn: random tokens seen again, so the loss falls and a wrong update shows in it."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    tokens = torch.randint(VOCABULARY, (2, BATCH, CONTEXT + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def fused_adamw(parameters):
    """Torch's fastest AdamW on a CPU; its default one is several times slower there."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
