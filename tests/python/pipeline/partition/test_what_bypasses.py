# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of blocks besides the chain's value, and what they return of them, are each micro-batch's own."""

import dataclasses
import threading

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.pipeline.errors import PipelineError

WIDTH, LENGTH, GAS, STEPS, RATE = 8, 6, 3, 3, 0.5
_seeding = threading.Lock()


class Block(nn.Module):
    """Returns what it was given besides."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def update(self, hidden, mask):
        return hidden + torch.tanh(self.mix(hidden)) * mask.unsqueeze(-1)

    def forward(self, hidden, given):
        return self.update(hidden, given), given


class Halves(Block):
    """Returns another mask, which it computes of the one that it was given."""

    def forward(self, hidden, given):
        return self.update(hidden, given), given * 0.5


class Writes(Block):
    """Changes the mask that it was given in place."""

    def forward(self, hidden, given):
        given.mul_(0.5)
        return self.update(hidden, given.clone()), given


class Counts(Block):
    """Is given a plain number besides, and returns the next one."""

    def forward(self, hidden, given):
        mask, number = given
        return self.update(hidden, mask / number), (mask, number + 1)


class Fills(Block):
    """Replaces what a dictionary holds, and counts in it."""

    def forward(self, hidden, given):
        given["mask"] = given["mask"] * 0.5
        given["number"] += 1
        return self.update(hidden, given["mask"] / given["number"]), given


class Looks(Block):
    """Branches on the mask's values, and hands on as many positions as any of its rows has."""

    def forward(self, hidden, given):
        length = max(1, int((given > 0).sum(1).max()))
        given = given[:, :length]
        return self.update(hidden[:, :length], given), given


@dataclasses.dataclass
class Context:
    mask: torch.Tensor
    number: int = 1


class Remembers(Block):
    """Is given an object, which it changes."""

    def forward(self, hidden, given):
        given.number += 1
        return self.update(hidden, given.mask / given.number), given


class Replaces(Block):
    """Returns another object than it was given."""

    def forward(self, hidden, given):
        return self.update(hidden, given.mask / given.number), Context(given.mask * 0.5, given.number + 1)


class Model(nn.Module):
    """`begin` makes of the mask what the first block is given besides."""

    def __init__(self, block, begin):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.begin = begin

    def forward(self, inputs, mask, labels):
        hidden, given = self.embed(inputs), self.begin(mask)
        for block in self.blocks:
            hidden, given = block(hidden, given)
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


def numbered(mask):
    return mask, 1 + int(mask.sum())  # a number of the batch's


MODELS = {
    "float": (Block, torch.clone),
    "integers": (Block, torch.Tensor.long),
    "halved": (Halves, torch.clone),
    "written": (Writes, torch.clone),
    "numbers": (Counts, numbered),
    "dictionary": (Fills, lambda mask: {"mask": mask, "number": 1}),
    "lengths": (Looks, torch.clone),
    "object": (Remembers, Context),
    "objects": (Replaces, Context),
}


def make(name):
    with _seeding:
        torch.manual_seed(3)
        return Model(*MODELS[name])


def batches():
    """Micro-batches of one shape, whose masks differ; later rows and positions are left out."""
    draws = torch.Generator().manual_seed(5)
    for number in range(STEPS * GAS):
        mask = torch.rand(2, LENGTH, generator=draws) + 0.5
        mask[0, LENGTH - number % 4 :] = 0
        mask[1, 3:] = 0
        yield torch.randn(2, LENGTH, 3, generator=draws), mask, torch.randint(0, 2, (2,), generator=draws)


def updates(model, before):
    return {name: value - before[name] for name, value in model.items()}


def train_alone(name):
    """(losses, updates) of plain torch."""
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, given = [], batches()
    for _ in range(STEPS):
        each = []
        for _ in range(GAS):
            loss = model(*next(given))
            (loss / GAS).backward()
            each.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each) / GAS)
    return losses, updates(model.state_dict(), before)


def settings(num_stages, **parallel):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": RATE}}, "gradient_clipping": 0.0}
    return models.config(0, gas=GAS, micro=2, parallel={"pipeline": num_stages, **parallel}, **sgd)


def train_cut(world, name, given):
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = deeptide.initialize(model=model, config=given, world=world)[0]
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    whole = engine.snapshot().state_dict()
    return losses, updates(whole, before)


def compare(got, expected):
    losses, changes = expected
    assert got[0] == pytest.approx(losses, rel=1e-5)
    assert got[1].keys() == changes.keys()
    for name, change in changes.items():
        change = change.double()
        assert change.norm() > 1e-5, name
        assert (got[1][name] - change).norm() < 1e-4 * change.norm(), name


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_later_stages_have_each_micro_batch_s_own(name, num_stages):
    for got in run_ranks(num_stages, train_cut, name, settings(num_stages)):
        compare(got, train_alone(name))


class Encoder(nn.Module):
    """Torch's, which in evaluation leaves padding out by nested tensors."""

    def __init__(self, **more):
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, **more)

    def forward(self, inputs, mask, labels):
        hidden = self.encoder(self.embed(inputs), src_key_padding_mask=mask == 0)
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


def evaluate(world, more):
    with _seeding:
        torch.manual_seed(3)
        model = Encoder(**more)
    if world is None:
        data = batches()
        with torch.no_grad():
            return sum(model.eval()(*next(data)).item() for _ in range(GAS)) / GAS
    engine = deeptide.initialize(model=model, config=settings(2), world=world)[0]
    try:
        return engine.eval_batch(batches()).item()
    except (PipelineError, deeptide.CommError) as error:
        return str(error)


def test_nested_tensors_between_stages_are_named_with_the_cure():
    assert any(
        "make torch.nn.TransformerEncoder with enable_nested_tensor=False" in text
        for text in run_ranks(2, evaluate, {})
    )
    plain = {"enable_nested_tensor": False}
    assert run_ranks(2, evaluate, plain) == [pytest.approx(evaluate(None, plain), rel=1e-5)] * 2
