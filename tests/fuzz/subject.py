# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model that programs act on: small, and with one of everything that has ever mattered to an engine."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deeptide.compression import CompressionSchedule, init_compression

VOCAB = 7
ROWS = 4


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class AutoEncoder(nn.Module):
    """Two parameters over one memory, one the transpose of the other."""

    def __init__(self, width):
        super().__init__()
        self.encode = nn.Linear(width, 3, bias=False)
        self.decode = nn.Linear(3, width, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.t())

    def forward(self, x):
        return x + self.decode(torch.tanh(self.encode(x)))


class Subject(nn.Module):
    """An embedding, blocks that a caller picks and orders, a head; everything smooth, so that rounding stays small.

    `forward` rebinds one buffer and writes another in place. spec: see `programs.py`; route: the blocks, in order;
    recompute: None, reentrant or plain.
    """

    def __init__(self, spec):
        super().__init__()
        width = spec["width"]
        self.embed = nn.Embedding(VOCAB, width, sparse="sparse" in spec["extras"])
        self.h = nn.ModuleList(Block(width, spec["norm"]) for _ in range(spec["blocks"]))
        self.pair = AutoEncoder(width) if spec["tie"] == "transposed" else None
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        if spec["tie"] == "head":
            self.head.weight = self.embed.weight
        extras = spec["extras"]
        self.scale = nn.Parameter(torch.tensor(1.0)) if "scalar" in extras else None
        self.unused = nn.Linear(3, 2) if "unused" in extras else None
        self.empty = nn.Parameter(torch.zeros(0)) if "empty" in extras else None
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, route, recompute=None):
        x = self.embed(tokens)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.calls += 1
        if self.scale is not None:
            x = x * self.scale
        for i in route:
            block = self.h[i % len(self.h)]
            x = checkpoint(block, x, use_reentrant=recompute == "reentrant") if recompute else block(x)
        if self.pair is not None:
            x = self.pair(x)
        return self.head(self.norm(x))


def compression_of(spec):
    """The sections of a configuration that prune single weights, where the model's spec asks for it."""
    pruning = spec.get("pruning")
    if not pruning:
        return {}
    shared = {"enabled": True, "method": "l1", "schedule_offset": pruning["offset"]}
    group = {"params": {"dense_ratio": pruning["share"]}, "modules": ["up"]}
    return {
        "compression_training": {
            "sparse_pruning": {"shared_parameters": shared, "different_groups": {"up": group}},
        }
    }


def schedule_of(spec, model):
    """When the model's pruning begins; None: it has none."""
    sections = compression_of(spec)
    return CompressionSchedule(model, {"train_batch_size": ROWS, **sections}) if sections else None


def make(spec, seed):
    """The same weights for the same seed; what `spec` freezes does not require grad."""
    torch.manual_seed(seed)
    model = Subject(spec)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in spec["frozen"]:
            parameter.requires_grad_(False)
    if spec.get("pruning"):
        init_compression(model, {"train_batch_size": ROWS, **compression_of(spec)})
    return model


def batch(seed):
    """(tokens, targets), each (ROWS,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (2, ROWS), generator=generator).unbind()


class Samples(torch.utils.data.Dataset):
    """Numbers from 0 on, which `rows` makes a batch of."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        return number


def rows(numbers):
    """(tokens, targets), each (len(numbers),)."""
    numbers = torch.tensor(numbers)
    return numbers % VOCAB, (3 * numbers + 1) % VOCAB


def loss_of(logits, targets, kind):
    logits = logits.float()
    return F.cross_entropy(logits, targets) if kind == "cross" else logits.square().mean()


def optimized_names(model, spec):
    """The names given to the optimizer, in up to two groups; the first name of each distinct parameter."""
    names = [n for n, p in model.named_parameters() if p.requires_grad and n not in spec["left_out"]]
    if spec["groups"] == 1 or len(names) < 2:
        return [names]
    second = [n for n in names if n.endswith("bias") or "norm" in n]
    return [group for group in ([n for n in names if n not in second], second) if group]
