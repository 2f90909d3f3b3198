# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle's model: what a step leaves out of it, and plain forms of what the engine has operators for."""

import math

import torch
from actions import subject
from torch import nn


def cast(model, dtype):
    """A model as 16 bits train it: buffers, and modules with running statistics, stay fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    if model.pair is not None:  # which torch unties
        model.pair.decode.weight.data = model.pair.encode.weight.data.t()


class Shares:
    """A life's shares of layers and tokens, which a copy of a model follows too."""

    def __init__(self, spec):
        self.depth, self.tokens = spec.get("depth"), spec.get("tokens")
        self.theta, self.kept = 1.0, self.tokens["min"] if self.tokens else 0
        self.is_uncertain = False  # a step that failed may have gone on with the layers' share

    def __deepcopy__(self, memo):
        return self

    def end_step(self, step):
        if self.depth:
            low = self.depth["theta"]
            self.theta = (1 - low) * math.exp(-self.depth["gamma"] * step) + low

    def begin_forward(self, step):
        if self.tokens and self.kept < subject.ROWS:
            grown = math.floor(step / self.tokens["steps"] * (subject.ROWS - self.tokens["min"]) + self.tokens["min"])
            self.kept = min(grown, subject.ROWS)

    def leaves_out(self):
        return bool(self.depth or self.tokens)


class PartlyRun:
    """A block that is left out now and then, and that sees some of its tokens: mixed into a block's class."""

    def forward(self, x):
        shares, number, count = self.__dict__["_shares"]
        block = super().forward
        if not self.training:
            return block(x)
        keep = 1 - number / count * (1 - shares.theta)
        if keep < 1 and torch.rand(()).item() >= keep:
            return x
        if not shares.tokens or shares.kept >= x.size(1):
            return block(x)
        chosen = torch.multinomial(torch.ones(1, x.size(1)), shares.kept)[0].sort().values
        return torch.index_copy(x, 1, chosen, block(x[:, chosen]))


class Plainly:
    """The same model, with the definitions of what the engine's has operators for: mixed into its class."""

    def masked_loss(self, hidden, targets):
        counted = targets != subject.IGNORED
        logits = nn.functional.linear(hidden.float(), self.head.weight.float(), self.head.bias.float())
        return nn.functional.cross_entropy(logits[counted], targets[counted])


class AttendsPlainly:
    """Each sequence by itself."""

    def attend(self, q, k, v, ids):
        rows = []
        for row in range(len(ids)):
            out = torch.zeros_like(v[row])
            for number in ids[row].unique():
                own = (ids[row] == number).nonzero()[:, 0]
                scores = q[row, own] @ k[row, own].t() / q.size(-1) ** 0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
                out = out.index_copy(0, own, scores.softmax(-1) @ v[row, own])
            rows.append(out)
        return torch.stack(rows)


def make_plain(model, shares):
    """Changes the classes of the model's parts; names stay."""

    def mix(module, kind):
        module.__class__ = type(type(module).__name__, (kind, type(module)), {})

    mix(model, Plainly)
    if model.mixer is not None:
        mix(model.mixer, AttendsPlainly)
    for number, block in enumerate(model.h if shares.leaves_out() else ()):
        mix(block, PartlyRun)
        block.__dict__["_shares"] = (shares, number, len(model.h))
