# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between stages have the values of their moment, may be written into, and join in types that hold them."""

import models
import pytest
import torch
from conftest import run_ranks
from stages import drawn

import deeptide
from deeptide.pipeline import PipelineModule, TiedLayerSpec
from deeptide.pipeline.errors import PipelineError

GAS, WIDTH = 4, 8


class Annealed(torch.nn.Module):
    """Hands on a buffer that its next forward changes in place."""

    def __init__(self):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), 3)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x):
        self.shift.mul_(0.5)
        return self.linear(x), self.shift


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = drawn(torch.nn.Linear(WIDTH, WIDTH), 4)

    def forward(self, given):
        x, shift = given
        return self.linear(x) + shift


class Summed:
    """A loss whose tensor later losses are added to."""

    total = None

    def __call__(self, outputs, labels):
        loss = (outputs - labels).square().mean()
        if self.total is None:
            self.total = loss.detach()
        else:
            self.total += loss.detach()
        return loss


def batches():
    draws = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 3, WIDTH, generator=draws)) for _ in range(GAS)]


def train(world, num_stages, schedule):
    model = PipelineModule([Annealed(), Shifted()], num_stages=num_stages, loss_fn=Summed(), world=world)
    settings = models.config(0, gas=GAS, micro=3, parallel={"schedule": schedule})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    loss = engine.train_batch(iter(batches())).item()
    return loss, engine.get_global_grad_norm()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_buffer_that_its_layer_changes_arrives_as_it_was_when_it_was_sent(schedule):
    layers = torch.nn.Sequential(Annealed(), Shifted())
    losses = [(layers(x) - labels).square().mean() / GAS for x, labels in batches()]
    for loss in losses:
        loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in layers.parameters()]).norm()
    for num_stages in (1, 2):
        for loss, its_norm in run_ranks(num_stages, train, num_stages, schedule):
            assert loss == pytest.approx(sum(losses).item(), rel=1e-6)
            assert its_norm == pytest.approx(norm.item(), rel=1e-6)


class Adds(torch.nn.Module):
    """Writes into what it is handed, as pre-activation blocks and position embeddings do."""

    def __init__(self, number, relu):
        super().__init__()
        self.linear, self.relu = drawn(torch.nn.Linear(WIDTH, WIDTH), number), torch.nn.ReLU(inplace=True)
        self.position, self.has_relu = torch.nn.Parameter(torch.ones(WIDTH) / number), relu

    def forward(self, x):
        if self.has_relu:
            return self.linear(self.relu(x)) + self.position
        x += self.position
        return self.linear(torch.tanh(x))


def in_place(relu):
    return [drawn(torch.nn.Linear(WIDTH, WIDTH), 3), *(Adds(number, relu) for number in range(4, 7))]


def train_in_place(world, num_stages, kind, relu):
    """(loss, norm) of a step."""
    layers, schedule = in_place(relu), "zero_bubble" if kind == "zero_bubble" else "1f1b"
    parallel = {"pipeline": num_stages} if kind in ("model", "loop") and num_stages > 1 else {"schedule": schedule}
    settings = models.config(0, gas=GAS, micro=3, parallel=parallel)
    model = torch.nn.Sequential(*layers)
    if kind not in ("model", "loop"):
        model = PipelineModule(layers, num_stages=num_stages, loss_fn=error_of, world=world)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    if kind != "loop":
        arguments = {"loss_fn": error_of} if kind == "model" else {}
        return engine.train_batch(iter(batches()), **arguments).item(), engine.get_global_grad_norm()
    losses = []
    for x, labels in batches():
        output = engine(x)
        losses.append(engine.backward(error_of(output, labels)))
        engine.step()
    return sum(losses).item(), engine.get_global_grad_norm()


def error_of(outputs, labels):
    return (outputs - labels).square().mean()


def alone(layers):
    """(loss, norm) of a step of plain torch."""
    losses = [error_of(layers(x), labels) / GAS for x, labels in batches()]
    for loss in losses:
        loss.backward()
    return sum(losses).item(), torch.stack([parameter.grad.norm() for parameter in layers.parameters()]).norm().item()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["layers", "model", "zero_bubble"])
def test_a_stage_may_begin_with_a_block_that_writes_into_what_it_is_handed(kind, relu):
    expected = alone(torch.nn.Sequential(*in_place(relu)))
    for found in run_ranks(2, train_in_place, 2, kind, relu):
        assert found == pytest.approx(expected, rel=1e-5)


class Normed(torch.nn.Module):
    def __init__(self, number, norm):
        super().__init__()
        self.linear, self.norm = drawn(torch.nn.Linear(WIDTH, WIDTH), number), norm

    def forward(self, x):
        return self.norm(self.linear(x))


def share_a_norm(world, kind):
    norm = torch.nn.BatchNorm1d(WIDTH)
    settings = models.config(0, gas=GAS, micro=3)
    if kind == "layers":
        first, last = (TiedLayerSpec("norm", torch.nn.BatchNorm1d, WIDTH) for _ in range(2))
        layers = [drawn(torch.nn.Linear(WIDTH, WIDTH), 3), first, drawn(torch.nn.Linear(WIDTH, WIDTH), 4), last]
        model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=error_of, world=world)
        arguments = {}
    else:
        model, arguments = torch.nn.Sequential(Normed(3, norm), Normed(4, norm)), {"loss_fn": error_of}
        settings["parallel"] = {"pipeline": 2}
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    engine.train_batch(iter(batches()), **arguments)


@pytest.mark.parametrize("kind", ["layers", "model"])
def test_a_batch_norm_that_blocks_of_two_stages_share_is_refused_by_name(kind):
    with pytest.raises(PipelineError, match=r"norm.*is written in forward, and stages 0, 1 use its BatchNorm1d"):
        run_ranks(2, share_a_norm, kind)


def test_layers_of_two_stages_that_share_a_weight_without_a_tie_are_refused():
    def build(world):
        layer = torch.nn.Linear(WIDTH, WIDTH)
        PipelineModule([layer, torch.nn.Linear(WIDTH, WIDTH), layer], num_stages=2, loss_fn=error_of, world=world)

    with pytest.raises(deeptide.ConfigError, match=r"layers 0 and 2 share a parameter .*TiedLayerSpec"):
        run_ranks(2, build)


def train_in_fp16(world, num_stages):
    """(norm, skipped steps) of many micro-batches, whose sum in fp16 would be infinite, and each is not."""
    gas = 64
    settings = models.config(0, gas=gas, micro=2, fp16={"enabled": True, "loss_scale": 2.0**15})
    settings["communication_data_type"] = "fp32"  # else the uncut model's sum is as infinite
    settings = {**settings, "parallel": {"pipeline": num_stages}} if num_stages > 1 else settings
    engine = deeptide.initialize(model=models.make_model(), config=settings, world=world)[0]
    tokens = torch.arange(12).reshape(2, 6)
    engine.train_batch(iter([(tokens, tokens.roll(1, 1))] * gas))
    return engine.get_global_grad_norm(), engine.skipped_steps


def test_gradients_of_a_tied_weight_join_in_fp32():
    norm, skipped = run_ranks(1, train_in_fp16, 1)[0]
    assert skipped == 0
    for found in run_ranks(2, train_in_fp16, 2):
        assert found == (pytest.approx(norm, rel=1e-2), 0)
