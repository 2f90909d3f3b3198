# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model of layers whose weights do not depend on who builds them, its batches, and its losses cut and uncut."""

import models
import torch
from torch.nn import functional as F

import deeptide
from deeptide.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, VOCABULARY, MICRO, LENGTH = 12, 19, 2, 5


def drawn(module, number):
    """Ranks may be threads, which share torch's own generator."""
    draws = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 3)
    return module


class Block(torch.nn.Module):
    """Hands on a dictionary: hidden states, a mask of integers, and a number."""

    def __init__(self, number):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        drawn(self, 100 + number)

    def forward(self, given):
        hidden, mask, count = given["hidden"], given["more"][0], given["more"][1]
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden)))) * mask
        return {"hidden": hidden, "more": (mask, count + 1)}


class Embedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        drawn(self, 7)

    def forward(self, tokens):
        mask = (tokens > 2).long().unsqueeze(-1)
        return {"hidden": F.embedding(tokens, self.weight), "more": (mask, 0)}


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        drawn(self, 8)

    def forward(self, given):
        return F.linear(given["hidden"], self.weight)


def tied_logits(embedding, given):
    return F.linear(given["hidden"], embedding.weight)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def layers(blocks=6, tied=False):
    if not tied:
        return [LayerSpec(Embedding), *(LayerSpec(Block, i) for i in range(blocks)), LayerSpec(Head)]
    middle = [LayerSpec(Block, i) for i in range(blocks)]
    last = TiedLayerSpec("embedding", Embedding, forward_fn=tied_logits)
    return [TiedLayerSpec("embedding", Embedding), *middle, last]


class Uncut(torch.nn.Module):
    """The same layers in one module, under the same names."""

    def __init__(self, blocks=6, tied=False):
        super().__init__()
        if tied:
            self.tied_modules = torch.nn.ModuleDict({"embedding": Embedding()})
        else:
            self.add_module("0", Embedding())
            self.add_module(str(blocks + 1), Head())
        for i in range(blocks):
            self.add_module(str(i + 1), Block(i))
        self.blocks, self.tied = blocks, tied

    def forward(self, tokens):
        embedding = self.tied_modules["embedding"] if self.tied else getattr(self, "0")
        given = embedding(tokens)
        for i in range(self.blocks):
            given = getattr(self, str(i + 1))(given)
        return tied_logits(embedding, given) if self.tied else getattr(self, str(self.blocks + 1))(given)


def batches(data_rank, data_size, steps, gas):
    """Micro-batches of changing length, (tokens, labels), of one rank of `data_size`."""
    draws = torch.Generator().manual_seed(5)
    for number in range(steps * gas * data_size):
        length = LENGTH + (number // data_size) % 3
        tokens = torch.randint(0, VOCABULARY, (MICRO, length), generator=draws)
        if number % data_size == data_rank:
            yield tokens, tokens.roll(1, 1)


def config(stage, gas, **more):
    return models.config(stage, gas=gas, micro=MICRO, **more)


def states_of(engine):
    """Masters and moments of this rank's parameters, whole."""
    found = {}
    for name, _ in engine.module.named_parameters():
        for role in ("master", "exp_avg", "exp_avg_sq"):
            value = engine._core.full_state(name, role)
            if value is not None:
                found[f"{name}/{role}"] = value
    return found


def train(engine, given, steps, loss_fn=None):
    """(losses, norms, states) of a few steps."""
    arguments = {"loss_fn": loss_fn} if loss_fn else {}
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(given, **arguments).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, states_of(engine)


def train_cut(world, num_stages, settings, gas, steps, module):
    model = PipelineModule(layers(**module), num_stages=num_stages, loss_fn=loss_of, world=world)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = batches(engine.data_parallel_rank, engine.data_parallel_size, steps, gas)
    return train(engine, given, steps)


def train_uncut(world, settings, gas, steps, module):
    engine = deeptide.initialize(model=Uncut(**module), config=settings, world=world)[0]
    return train(engine, batches(world.rank, world.size, steps, gas), steps, loss_of)
