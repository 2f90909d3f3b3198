# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model made from data: a chain of blocks with the traits that program.py names."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 13
HEADS = 4


class Snake(nn.Module):
    """An activation with a parameter: one for all features, or one for each."""

    def __init__(self, count):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(count))

    def forward(self, x):
        return x + torch.sin(self.alpha * x).square() / 2


class Attention(nn.Module):
    def __init__(self, width, traits):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, width // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        norms = traits.get("head_norm")
        self.q_norm = nn.LayerNorm(self.head_dim) if norms == "shared" else None
        self.k_norms = nn.ModuleList(nn.LayerNorm(self.head_dim) for _ in range(HEADS)) if norms == "each" else None

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norms is not None:  # as Transformers' StableLm
            k = torch.cat([norm(head) for norm, head in zip(self.k_norms, k.split(1, 1))], 1)
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, width, traits):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        kind = traits.get("activation")
        self.act = Snake(1 if kind == "scalar" else 2 * width) if kind else nn.GELU()

    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x)))


def _drawn(by):
    return {"torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "python": random.random}[by]()


class Block(nn.Module):
    """Hands on hidden states, and what it was given besides, in the form that the traits name."""

    def __init__(self, number, width, traits, norm=None):
        super().__init__()
        self.number, self.traits = number, traits
        self.norm = nn.LayerNorm(width)
        self.self_attn, self.mlp = Attention(width, traits), MLP(width, traits)
        self.batch_norm = norm
        if "counter" in traits or "hands_buffer" in traits:
            self.register_buffer("calls", torch.zeros(()))
        if traits.get("in_place") == "position":
            self.position = nn.Parameter(torch.empty(width))

    def forward(self, hidden, mask=None, count=None):
        is_dict = isinstance(hidden, dict)
        if is_dict:
            hidden, mask, count = hidden["hidden"], hidden.get("mask"), hidden.get("count")
        hidden = self.change(hidden, mask, count)
        traits = self.traits
        if traits.get("mask", {}).get("changes") and mask is not None:
            mask = ~mask if mask.dtype == torch.bool else mask + 1
        if "hands_buffer" in traits:
            count = self.calls
        elif isinstance(count, int):
            count = count + 1
        form = traits["form"]
        if form == "dict":
            return {"hidden": hidden, "mask": mask, "count": count}
        if form == "returned":
            return hidden, mask, count
        return (hidden, None) if form == "tuple" else hidden

    def change(self, hidden, mask, count):
        traits = self.traits
        if traits.get("in_place") == "position":
            hidden += self.position
        elif traits.get("in_place") == "relu":
            F.relu_(hidden)
        factor = 1.0
        if self.training and ("counter" in traits or "hands_buffer" in traits):
            self.calls += 1
            factor = 1 + self.calls / 10 if "counter" in traits else factor
        if isinstance(count, torch.Tensor):
            factor = factor * (1 + count / 10)
        elif count is not None:
            factor = factor * (1 + count % 7 / 20)
        draws = traits.get("draws", {})
        if draws.get("where") == "block" and self.training and self.number == 0:
            factor = factor * (1 + _drawn(draws["by"]))
        inner = self.norm(hidden)
        if self.batch_norm is not None:
            inner = self.batch_norm(inner.transpose(1, 2)).transpose(1, 2)
        change = self.self_attn(inner) + self.mlp(inner)
        if traits.get("in_place") == "own":
            change.mul_(0.5).add_(0.01)
        if "grad_inside" in traits and torch.is_grad_enabled() and hidden.requires_grad:
            (slope,) = torch.autograd.grad(change.square().sum(), hidden, create_graph=True)
            change = change + slope / 10
        if mask is not None:
            change = change * (1 + mask.to(change.dtype) / 2)
        return hidden + change * factor


class Model(nn.Module):
    """A model as `program.py` describes it. `step` is set by the program: some traits come and go."""

    def __init__(self, spec):
        super().__init__()
        width, traits = spec["width"], spec["traits"]
        self.traits, self.step = traits, 0
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        norm = nn.BatchNorm1d(width) if "shared_norm" in traits else None
        self.layers = nn.ModuleList(Block(number, width, traits, norm) for number in range(spec["blocks"]))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        if "tie" in traits:
            self.lm_head.weight = self.embed_tokens.weight

    def begins(self, trait):
        return trait in self.traits and self.step >= self.traits[trait].get("from", 0)

    def _mask(self, tokens, hidden, mask):
        asked = self.traits.get("mask")
        if not asked:
            return None
        if asked["of"] == "hidden":
            return torch.sigmoid(hidden.mean(-1, keepdim=True))
        mask = mask if asked["of"] == "batch" else (tokens % 3).unsqueeze(-1)
        return mask.to(getattr(torch, asked["type"]))

    def forward(self, tokens, labels=None, mask=None, number=None):
        traits = self.traits
        hidden = self.embed_tokens(tokens)
        mask = self._mask(tokens, hidden, mask)
        count = 0 if "count" in traits else number if traits.get("number") == "used" else None
        shared = None
        if self.begins("draws") and traits["draws"]["where"] == "shared" and self.training:
            shared = _drawn(traits["draws"]["by"])
            hidden = hidden * (1 + shared)
        begin, extra, first = hidden, 0.0, None
        last = len(self.layers)
        if self.begins("exit") and self.training:
            last = traits["exit"]["after"]
        for number, block in enumerate(self.layers[:last]):
            if "skip" in traits and number == len(self.layers) - 1:
                if traits.get("in_place") == "skipped":
                    first.mul_(1.5)
                hidden = hidden + first
            if traits["form"] == "dict":
                given = block({"hidden": hidden, "mask": mask, "count": count})
                hidden, mask, count = given["hidden"], given["mask"], given["count"]
            elif traits["form"] == "returned":
                hidden, mask, count = block(hidden, mask, count)
            else:
                output = block(hidden, mask=mask, count=count)
                hidden = output[0] if traits["form"] == "tuple" else output
            first = hidden if first is None else first
            if traits.get("in_place") == "between":
                hidden += 0.1
            if traits.get("hook") == number and hidden.requires_grad:
                hidden.register_hook(lambda gradient: 2 * gradient.clamp(min=0))
            if self.begins("auxiliary") and traits["auxiliary"]["of"] == "hidden":
                extra = extra + hidden.square().mean() / 10
        if shared is not None:
            hidden = hidden * (1 + shared)
        if "slope" in traits and hidden.requires_grad:
            (slope,) = torch.autograd.grad(hidden.square().sum(), begin, create_graph=True)
            hidden = hidden + slope / 10
        logits = self.lm_head(self.norm(hidden))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.begins("auxiliary") and traits["auxiliary"]["of"] == "weight":
            extra = self.embed_tokens.weight.square().mean()
        return loss + extra, logits


def make(spec, seed):
    """The same values on every rank, a parameter's by its name. No weight is alike another, as fresh norms' are."""
    model = Model(spec)
    set_values(model, spec, seed)
    return model


def set_values(model, spec, seed, name_of=str):
    """Values of each parameter. name_of: the plain model's name of one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name_of(name)
            draws = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
            values = torch.randn(parameter.shape, generator=draws) / 3
            parameter.copy_(values + 1 if "norm" in name and name.endswith("weight") else values)
            parameter.requires_grad_(not any(part in name for part in spec["frozen"]))


def batch(program, step, micro, collated=True):
    """The micro-batch of a step, which all ranks read. collated: as a collator does that masks some labels."""
    draws = torch.Generator().manual_seed(10**6 + 1000 * program["seed"] % 10**6 + 10 * step + micro)
    tokens = torch.randint(0, VOCABULARY, (2, program["length"]), generator=draws)
    given = {"tokens": tokens, "labels": tokens.roll(1, 1)}
    traits = program["model"]["traits"]
    if collated and "collated" in traits:
        given["labels"] = torch.where(torch.rand(tokens.shape) < 0.5, tokens, given["labels"])
    if traits.get("mask", {}).get("of") == "batch":
        given["mask"] = torch.randint(0, 3, (2, program["length"], 1), generator=draws).float()
    if "number" in traits:
        given["number"] = 10 * step + micro
    return given
