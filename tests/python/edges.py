# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model whose programs do things to it after initialize, and its plain torch twin."""

import models
import torch
from torch import nn

import deeptide

STAGES = [0, 1, 2, 3]


class Net(nn.Module):
    """Two layers, one of which a caller may skip, and a running mean that forward rebinds."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, skip=False):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean.dtype)
        x = torch.tanh(self.first(x))
        return self.head(x if skip else torch.tanh(self.second(x)))


class AutoEncoder(nn.Module):
    """Two parameters over one memory, one the transpose of the other."""

    def __init__(self, transposed_first=False):
        super().__init__()
        self.encoder = nn.Linear(6, 3, bias=False)
        self.decoder = nn.Linear(3, 6, bias=False)
        if transposed_first:
            self.encoder.weight = nn.Parameter(self.decoder.weight.t())
        else:
            self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def inputs(rank=0, step=0, width=6):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * rank + step))


def start(world=None, stage=0, kind=Net, model=None, **extra):
    model = models.make_model(kind=kind) if model is None else model
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, **extra), world=world)
    return engine


def train(engine, steps=1, first=0, rank=0, **call):
    for step in range(first, first + steps):
        x = inputs(rank, step).to(next(p for p in engine.module.parameters() if p.is_floating_point()).dtype)
        engine.backward(engine(x, **call).float().square().mean())
        outcome = engine.step()
    return outcome


def plain(kind=Net, **options):
    model = models.make_model(kind=kind)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, **options}
    return model, torch.optim.AdamW(model.parameters(), **settings)


def plain_update(model, optimizer, losses, ranks):
    """One step with the mean over `ranks`, which may be more than have a loss: some have joined."""
    for loss in losses:
        (loss / ranks).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def plain_step(model, optimizer, step, ranks=1, **call):
    losses = (model(inputs(rank, step), **call).square().mean() for rank in range(ranks))
    plain_update(model, optimizer, losses, ranks)


def final_state(engine):
    """The engine's last words. Collective."""
    state = engine.module_state_dict()
    engine.destroy()
    return state


TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def assert_trained_as(state, model):
    """The parameters of `state` are those of plain torch's `model`."""
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), msg=lambda t, n=name: f"{n}: {t}", **TOLERANCE)
