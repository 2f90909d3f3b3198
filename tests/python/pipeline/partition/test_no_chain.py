# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models that are no chain of blocks are refused by name, with the cure, and never trained wrongly."""

import functools
import random
import re

import families
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.pipeline.cutting.cut import cut_of
from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError

GAS = 2
CURE = r"write (it|the model) as a deeptide\.pipeline\.PipelineModule"


class Model(nn.Module):
    """A chain of four blocks, until a subclass makes something else of it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(families.VOCABULARY, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, families.VOCABULARY)

    def begin(self, tokens):
        return self.embed(tokens)

    def through(self, hidden):
        for block in self.blocks:
            hidden = self.step(block, hidden)
        return hidden

    def step(self, block, hidden):
        return block(hidden).tanh()

    def end(self, hidden, tokens):
        return self.head(hidden)

    def forward(self, tokens, labels):
        logits = self.end(self.through(self.begin(tokens)), tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TiesByFunction(Model):
    def end(self, hidden, tokens):
        return F.linear(hidden, self.embed.weight)


class Penalizes(Model):
    """A function takes the weights of all blocks."""

    def end(self, hidden, tokens):
        return super().end(hidden, tokens) * sum(block.weight.square().mean() for block in self.blocks)


class WritesLater(Model):
    """A block's output is kept, and written in place after it."""

    def through(self, hidden):
        kept = []
        for block in self.blocks:
            hidden = block(hidden)
            kept.append(hidden)
            hidden = hidden.mul_(2.0)
        return hidden * torch.stack(kept).mean()


class Parts(Model):
    """The second stage alone calls a module of the first."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(12, 12)
        self.blocks, self.head = self._modules.pop("blocks"), self._modules.pop("head")  # registered after it

    def begin(self, tokens):
        hidden = super().begin(tokens)
        self.more = 1 if type(self.embed.weight) is nn.Parameter else self.before(hidden).mean()
        return hidden

    def end(self, hidden, tokens):
        return super().end(hidden * self.more, tokens)


class CallsOtherwise(Model):
    """The second stage alone calls a module of the first once more, before the others do."""

    def begin(self, tokens):
        self.more = 1 if type(self.embed.weight) is nn.Parameter else self.embed(tokens + 1).mean()
        return super().begin(tokens)

    def end(self, hidden, tokens):
        return super().end(hidden * self.more, tokens)


class Loops(Model):
    def through(self, hidden):
        return super().through(super().through(hidden))


class Looks(Model):
    """Python branches on a weight."""

    def begin(self, tokens):
        hidden = super().begin(tokens)
        return hidden if self.embed.weight.mean() > 100 else -hidden


class Writes(Model):
    def begin(self, tokens):
        hidden = torch.zeros(*tokens.shape, 12)
        hidden[:] = self.embed.weight[0]
        return hidden


class Draws(Model):
    def begin(self, tokens):
        return super().begin(torch.where(torch.rand(tokens.shape) < 0.2, 0, tokens))


class DropsSkips(Model):
    """Each stage would draw another mask for what the end takes."""

    def begin(self, tokens):
        self.first = F.dropout(super().begin(tokens))
        return self.first

    def end(self, hidden, tokens):
        return super().end(hidden + self.first, tokens)


class DrawsByPython(Model):
    """The stages' programs part; ranks as threads share Python's generator, which therefore never repeats."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def through(self, hidden):
        by = random.random()
        for block in self.blocks:
            hidden = block(hidden, by)
        return hidden


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, hidden, by):
        return self.linear(hidden) * by


def parts(world):
    """A branch on the rank: the second stage leaves its first block out, and its next one takes the value as well."""
    model = Model()
    model.blocks.extend(nn.Linear(12, 12) for _ in range(4))
    settings = families.config(0, GAS, 2, deeptide={"error_grace": 0.2})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    assert engine._cut.parts[1] < len(model.blocks) - 1
    blocks = list(model.blocks)
    if world.rank == 1:
        del blocks[engine._cut.parts[1]]
    model.through = lambda hidden: functools.reduce(lambda value, block: block(value).tanh(), blocks, hidden)
    with pytest.raises((PipelineError, deeptide.CommError)) as raised:
        engine.train_batch(families.batches("plain", 0, 1, 1, GAS))
    return str(raised.value)


def test_stages_that_take_different_branches_are_named():
    texts = run_ranks(2, parts)
    assert any(
        re.search(r"stage 1 of 2: blocks\.\d is called .*or in the place of another block: the stages' programs", each)
        for each in texts
    ), texts


def ends_early(world, at):
    """A branch on the rank: that of stage `at` calls none of the second stage's blocks, and the model runs on."""
    model = Model()
    settings = families.config(0, GAS, 2, deeptide={"error_grace": 0.2})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    blocks = list(model.blocks)[: 2 if world.rank == at else None]
    model.through = lambda hidden: functools.reduce(lambda value, block: block(value).tanh(), blocks, hidden)
    with pytest.raises((PipelineError, deeptide.CommError)) as raised:
        engine.train_batch(families.batches("plain", 0, 1, 1, GAS))
    return str(raised.value)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, r"stage 1 of 2: blocks\.\d is called .*than stage 0 ended with, .*: the stages' programs differ"),
        (1, r"stage 1 of 2: the model's forward ended after blocks\.1 of its blocks, and stage 0 went on to another"),
    ],
)
def test_a_stage_that_ends_its_program_early_is_named(at, text):
    texts = run_ranks(2, ends_early, at)
    assert any(re.search(text, each) for each in texts), texts


def meet(world, kind, settings):
    model = kind()
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = families.batches("plain", 0, 1, 1, GAS)
    with pytest.raises((PipelineError, deeptide.CommError)) as raised:
        engine.train_batch(given)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TiesByFunction, r"stage 1 of 2: the loss depends on 'embed\.weight' .*head\.weight = embedding\.weight"),
        (Loops, r"stage 1 of 2: block blocks\.0 was called after blocks\.3, expected each block once, in order"),
        (Looks, r"aten\.(_local_scalar_dense|is_nonzero)\S* needs the values of what comes from 'embed\.weight'"),
        (Writes, r"aten\.\S+ writes what comes from 'embed\.weight', which another stage has, into a tensor"),
        (Penalizes, r"stage 1 of 2: the loss depends on 'blocks\.\d\.weight' otherwise than through the chain"),
        (WritesLater, r"stage 0 of 2: the output of 'blocks\.\d' is written in place, and a later stage uses it"),
        (Parts, r"an output of 'before' is used by a later stage of the pipeline and does not come there"),
        (CallsOtherwise, r"stage 1 of 2: 'embed' is called with other arguments than on the stage that computes it"),
        (Draws, r"aten\.rand\S* draws random numbers before this stage's blocks"),
        (DropsSkips, r"aten\.bernoulli\S* draws random numbers before this stage's blocks"),
        (DrawsByPython, r"blocks\.3 is called with other arguments than stage 0 ended with"),
    ],
)
def test_what_is_no_chain_is_named(kind, text):
    settings = families.config(0, GAS, 2, deeptide={"error_grace": 0.2})
    met = run_ranks(2, meet, kind, settings)
    texts = [each for kind_, each in met if kind_ is PipelineError]
    assert any(re.search(text, each) for each in texts), met
    assert all(re.search(CURE, each) or "programs differ" in each for each in texts), met


def refuse(world, make, text, num_stages):
    model = make()
    before = dict(model.named_parameters(remove_duplicate=False))
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=model, config=families.config(1, GAS, num_stages), world=world)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert [type(module) for module in model.modules()] == kinds and cut_of(model) is None


class Towers(nn.Module):
    """Two chains side by side, as of texts and pictures."""

    def __init__(self):
        super().__init__()
        self.texts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.pictures = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))


def with_one_block_twice():
    model = Model()
    model.blocks[3] = model.blocks[0]
    return model


@pytest.mark.parametrize(
    ("make", "text", "num_stages"),
    [
        (Towers, r"Towers has more than one chain of blocks: (texts|pictures), (texts|pictures); .*" + CURE, 2),
        (lambda: nn.Linear(3, 3), r"Linear has no ModuleList or Sequential of 2 blocks or more.*" + CURE, 2),
        (Model, r"Model has no ModuleList or Sequential of 6 blocks or more", 6),
        (with_one_block_twice, r"blocks holds one module twice", 2),
    ],
)
def test_a_model_without_one_chain_is_refused_and_left_whole(make, text, num_stages):
    run_ranks(num_stages, refuse, make, text, num_stages)


def fail_late(world):
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    names, groups = dict(model.named_parameters()), list(optimizer.param_groups[0]["params"])
    with pytest.raises(deeptide.ConfigError, match="collate_fn was given without training_data"):
        deeptide.initialize(
            model=model, optimizer=optimizer, collate_fn=list, config=families.config(0, GAS, 2), world=world
        )
    assert all(parameter is names[name] for name, parameter in model.named_parameters())
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, groups))
    assert len(optimizer.state) == len(groups)
    assert model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)).requires_grad


def test_an_error_of_initialize_leaves_model_and_optimizer_whole():
    run_ranks(2, fail_late)


def reads_other_batches(world):
    engine = deeptide.initialize(model=families.make("llama"), config=families.config(0, GAS, 2), world=world)[0]
    with pytest.raises(ValueError, match="the micro-batches of stages 0 and 1 differ"):
        engine.train_batch(families.batches("llama", world.rank, 2, 1, GAS))
    with pytest.raises(ValueError, match="need an iterator" if world.rank else "stage 1 has no micro-batches"):
        engine.train_batch(None if world.rank else families.batches("llama", 0, 1, 1, GAS))
    with pytest.raises(ValueError, match="ended after 1 of 2 micro-batches" if world.rank else "see its error"):
        engine.train_batch(iter(list(families.batches("llama", 0, 1, 1, GAS))[: GAS - world.rank]))
    with pytest.raises(PipelineError, match=r"layers\.0: the model is cut into 2 stages; call engine\.train_batch"):
        engine.module(input_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(StopIteration):
        engine.train_batch(iter(()))
    assert engine.train_batch(families.batches("llama", 0, 1, 1, GAS)) > 0


def test_stages_that_read_other_batches_are_told():
    run_ranks(2, reads_other_batches)


def gives_out_weights(world):
    model = Model()
    model.end = lambda hidden, tokens: {"loss": model.head(hidden).square().mean(), "first": model.embed.weight[0]}
    model.forward = lambda tokens, labels: model.end(model.through(model.begin(tokens)), tokens)
    settings = families.config(0, GAS, 2, deeptide={"error_grace": 0.2})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = list(families.batches("plain", 0, 1, 1, GAS))
    for _ in range(2):  # a loss does not need them
        engine.train_batch(iter(given))
    if world.rank == 1:
        with pytest.raises(PipelineError, match=r"the output depends on 'embed\.weight'"):
            engine.eval_batch(iter(given), return_logits=True)
    else:
        with pytest.raises(deeptide.CommError):
            engine.eval_batch(iter(given), return_logits=True)
            engine.train_batch(iter(given))


def test_an_output_with_values_of_other_stages_is_not_given_out():
    run_ranks(2, gives_out_weights)


def test_operators_on_tensors_of_other_stages_know_shapes_and_nothing_else():
    other = Elsewhere(torch.empty(2, 3), "there")
    assert (other @ torch.ones(3, 5)).shape == (2, 5) and other.bfloat16().dtype == torch.bfloat16
    assert (other + 1).origin == F.softmax(torch.ones(2, 3) * other, -1).origin == "there"
    for made in (torch.ones_like(other), other.new_zeros(2, 3)):
        assert type(made) is torch.Tensor and made.shape == (2, 3) and made.device.type == "cpu"
    assert other.mul_(2) is other and "there" in repr(other)
    for looks in (
        lambda t: t.sum().item(),
        lambda t: bool((t > 0).any()),
        torch.nonzero,
        torch.zeros(2, 3).add_,
        lambda t: t.tolist(),
    ):
        with pytest.raises(ElsewhereError, match="'there', which another stage has"):
            looks(other)
