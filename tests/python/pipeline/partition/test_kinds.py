# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Needs of forwards may change at any time: the stages learn them anew, and train as plain torch does."""

import pytest
import torch
from conftest import run_ranks
from test_what_bypasses import GAS, RATE, STEPS, WIDTH, Block, _seeding, batches, compare, settings, updates
from torch import nn
from torch.nn import functional as F

import deeptide


class Keeps(Block):
    """Keeps a value for the loss, if the model's configuration says so."""

    def forward(self, hidden, config, count):
        hidden = self.update(hidden, hidden.new_ones(hidden.shape[:2]) / count)
        if config["aux"]:
            self.kept = self.mix(hidden)
        return hidden


class Model(nn.Module):
    """Counts its forwards in a buffer, by which it scales; normalizes over the batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("count", torch.zeros(()))
        self.config = {"aux": False}

    def forward(self, inputs, mask, step=0):
        self.count += 1
        first = hidden = self.norm(self.embed(inputs).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden, self.config, 1 + step)
        logits = self.head(hidden.mean(1)) * (1 + self.count / 100) / (1 + step / 100)
        kept = sum(block.kept.square().mean() for block in self.blocks) if self.config["aux"] else 0.0
        return logits, first, kept


class Loss:
    """An auxiliary loss over what the first stage computes, once its flag is set, or after so many calls."""

    def __init__(self, calls=10**6):
        self.aux, self.calls, self.count = False, calls, 0

    def __call__(self, output, labels):
        self.count += 1
        logits, first, kept = output
        loss = F.cross_entropy(logits, labels) + kept
        return loss + first.tanh().mean() if self.aux or self.count > self.calls else loss


def flags_loss(model, loss, step):
    loss.aux = step != 1


def flags_model(model, loss, step):
    model.config["aux"] = step == 1


def nothing(model, loss, step):
    pass


# By name: what changes before each step, and after how many calls of the loss.
CHANGES = {"loss": (flags_loss, 10**6), "model": (flags_model, 10**6), "calls": (nothing, GAS + 1)}


def make():
    with _seeding:
        torch.manual_seed(3)
        return Model()


def given():
    for number, (inputs, mask, labels) in enumerate(batches()):
        yield {"inputs": inputs, "mask": mask, "step": number, "labels": labels}


def train_alone(change):
    """(losses, updates, buffers) of plain torch."""
    model, (edit, calls) = make(), CHANGES[change]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, data, loss_fn = [], given(), Loss(calls)
    for step in range(STEPS):
        edit(model, loss_fn, step)
        each = []
        for _ in range(GAS):
            batch = next(data)
            labels = batch.pop("labels")
            each.append(loss_fn(model(**batch), labels))
            (each[-1] / GAS).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in each) / GAS)
    return losses, updates(model.state_dict(), before)


def train_cut(world, change, config):
    model, (edit, calls) = make(), CHANGES[change]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    losses, data, loss_fn = [], given(), Loss(calls)
    for step in range(STEPS):
        edit(model, loss_fn, step)
        losses.append(engine.train_batch(data, loss_fn=loss_fn).item())
    return losses, updates(engine.snapshot().state_dict(), before), len(engine._cut.kinds._seen)


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("parallel", ["1f1b", "zero_bubble", "interleaved"])
def test_a_kind_opens_again_when_its_forwards_need_more(change, parallel):
    """The step is right in which that happens, buffers included, and a number that only travels makes no kinds."""
    for losses, changes, kinds in run_ranks(2, train_cut, change, settings(2, schedule=parallel)):
        compare((losses, changes), train_alone(change))
        assert kinds == 1


def train_unlike(world):
    """The second data rank's loss needs more from the second step on, so it alone makes forwards again."""
    model, loss_fn = make(), Loss()
    engine = deeptide.initialize(model=model, config={**settings(2), "zero_optimization": {"stage": 2}}, world=world)[0]
    before = {key: value.clone() for key, value in engine.snapshot().state_dict().items()}
    data, losses = given(), []
    for step in range(STEPS):
        loss_fn.aux = step > 0 and engine.data_parallel_rank == 1
        losses.append(engine.train_batch(data, loss_fn=loss_fn).item())
    return losses, updates(engine.snapshot().state_dict(), before)


def test_one_data_rank_may_need_more():
    """The same batches on both: gradients are the mean of one with the auxiliary loss and one without."""
    model, loss_fn = make(), Loss()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer, data, losses = torch.optim.SGD(model.parameters(), lr=RATE), given(), []
    for step in range(STEPS):
        each = []
        for _ in range(GAS):
            batch = next(data)
            labels = batch.pop("labels")
            output = model(**batch)
            for loss_fn.aux in (False, step > 0):
                each.append(loss_fn(output, labels))
        mean = sum(each) / len(each)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    for got in run_ranks(4, train_unlike):
        compare(got, (losses, updates(model.state_dict(), before)))


def evaluate(world):
    model, loss_fn = make(), Loss()
    engine = deeptide.initialize(model=model, config=settings(2), world=world)[0]
    losses = []
    for aux in (False, True, False):
        loss_fn.aux = aux
        losses.append(engine.eval_batch(given(), loss_fn=loss_fn).item())
    return losses


def test_an_evaluation_may_need_more():
    model, loss_fn, expected = make().eval(), Loss(), []
    data = {aux: given() for aux in range(3)}
    for number, aux in enumerate((False, True, False)):
        loss_fn.aux = aux
        each = []
        for _ in range(GAS):
            batch = next(data[number])
            labels = batch.pop("labels")
            each.append(loss_fn(model(**batch), labels).item())
        expected.append(sum(each) / GAS)
    assert run_ranks(2, evaluate) == [pytest.approx(expected, rel=1e-5)] * 2


class Whole(Model):
    """Returns its loss, and takes more into it once it is told so."""

    def forward(self, inputs, mask, labels, step=0):
        logits, first, kept = super().forward(inputs, mask, step)
        return F.cross_entropy(logits, labels) + kept + (first.tanh().mean() if self.config["aux"] else 0.0)


def own_loop(model, step, engine):
    """A program's loop: forward, backward, step; (losses)."""
    data, losses = given(), []
    for number in range(STEPS):
        model.config["aux"] = number == 1
        each = []
        for _ in range(GAS):
            loss = engine(**next(data))
            step(loss, engine)
            each.append(loss.item())
        losses.append(sum(each) / GAS)
    return losses


def train_by_hand(world):
    with _seeding:
        torch.manual_seed(3)
        model = Whole()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = deeptide.initialize(model=model, config=settings(2), world=world)[0]

    def step(loss, engine):
        engine.backward(loss)
        engine.step()

    losses = own_loop(model, step, engine)
    return losses, updates(engine.snapshot().state_dict(), before)


def test_the_program_s_own_loop_may_need_more():
    with _seeding:
        torch.manual_seed(3)
        model = Whole()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=RATE), []

    def step(loss, engine):
        (loss / GAS).backward()
        counts.append(loss)
        if len(counts) % GAS == 0:
            optimizer.step()
            optimizer.zero_grad()

    expected = own_loop(model, step, model)
    for got in run_ranks(2, train_by_hand):
        compare(got, (expected, updates(model.state_dict(), before)))


class Named(Model):
    """Takes a text, which no computation looks at."""

    def forward(self, inputs, mask, labels, name, step):
        return F.cross_entropy(super().forward(inputs, mask, step)[0], labels)


def count_passes(world, steps):
    """(kinds that were settled, blocks that were computed on shapes, what the user was told) on a stage."""
    with _seeding:
        torch.manual_seed(3)
        model = Named()
    engine = deeptide.initialize(model=model, config=settings(2), world=world)[0]
    passage, calls, told = engine._cut.passage, [], []
    on_shapes = passage._on_shapes
    passage._on_shapes = lambda *given: calls.append(given) or on_shapes(*given)
    engine._cut.kinds.say = told.append

    def data():
        for number in range(steps * GAS):
            yield {**next(given()), "step": number, "name": f"batch {number}"}

    batches = data()
    for _ in range(steps):
        engine.train_batch(batches)
    return len(engine._cut.skips._settled), len(calls), told


def test_texts_that_are_ever_new_are_bounded_and_the_user_is_told():
    for settled, calls, told in run_ranks(2, count_passes, 15):
        assert settled == 33 and calls in (0, 2 * 35)  # two blocks: once a kind, and for three numbers of the last one
        assert len(told) == 1 and "called in 32 ways" in told[0]
