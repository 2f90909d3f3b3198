# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Rows without a label never meet the head: values, gradients, memory, edges, sharded heads."""

import models
import pytest
import torch
import torch.nn.functional as F
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import ops

TYPES = [torch.float32, torch.bfloat16]
# Relative to the largest value, 1 at least: fp32 sums of up to 20,011 products; bf16 has 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-11}
LABELS = {
    "none ignored": lambda rows: torch.arange(rows) % 5,
    "one left": lambda rows: torch.where(torch.arange(rows) == rows // 2, 3, -100),
    "15 %": lambda rows: torch.where(torch.arange(rows) % 7 == 1, torch.arange(rows) % 5, -100),
    "last ignored": lambda rows: torch.where(torch.arange(rows) == rows - 1, -100, 4),
}


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("rows", "classes"), [(1, 5), (29, 33), (500, 20_011)])  # the last in two or more chunks
def test_equals_the_dense_head(rows, classes, labels, reduction, dtype):
    targets = LABELS[labels](rows)
    if (targets == -100).all():
        targets[0] = 2
    torch.manual_seed(1)
    inputs = [torch.randn(rows, 16), 0.3 * torch.randn(classes, 16), torch.randn(classes)]
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    more = {"reduction": reduction, "label_smoothing": 0.1}
    got = ops.linear_cross_entropy(*mine[:2], targets, bias=mine[2], **more)
    expected = F.cross_entropy(F.linear(*exact), targets, **more)
    (3 * got).backward()
    (3 * expected).backward()
    for one, other in ((got, expected), *((x.grad, y.grad) for x, y in zip(mine, exact, strict=True))):
        limit = TOLERANCE[dtype] * max(1.0, other.abs().max().item())
        assert (one.double() - other).abs().max().item() <= limit


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_no_labels_at_all_is_torchs(reduction, dtype):
    targets = torch.full((4,), -100)
    results = []
    for function in (
        lambda h, w, b: ops.linear_cross_entropy(h, w, targets, reduction=reduction, bias=b),
        lambda h, w, b: F.cross_entropy(F.linear(h, w, b).float(), targets, reduction=reduction),
    ):
        leaves = [torch.ones(*shape, dtype=dtype).requires_grad_() for shape in ((4, 8), (6, 8), (6,))]
        loss = function(*leaves)
        if reduction == "sum":
            loss.backward()
            assert all((leaf.grad == 0).all() for leaf in leaves)
        results.append(loss.item())
    assert results == [0.0, 0.0] if reduction == "sum" else all(value != value for value in results)


def test_only_the_gradients_asked_for_are_made():
    targets = torch.tensor([1, -100, 3])
    for asked in range(8):
        leaves = [torch.randn(*shape) for shape in ((3, 4), (5, 4), (5,))]
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(bool(asked >> index & 1))
        loss = ops.linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2])
        assert loss.requires_grad == (asked != 0)
        if asked:
            loss.backward()
        assert [leaf.grad is not None for leaf in leaves] == [leaf.requires_grad for leaf in leaves]


def test_no_tensor_is_as_large_as_the_logits_of_all_rows():
    hidden, weight = torch.randn(400, 16, requires_grad=True), torch.randn(1000, 16, requires_grad=True)
    targets = torch.where(torch.arange(400) % 7 == 1, 5, -100)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ops.linear_cross_entropy(hidden, weight, targets).backward()
    largest = max(event.cpu_memory_usage for event in seen.events())
    count = int((targets != -100).sum())
    assert count * 1000 * 4 <= largest < 400 * 1000 * 4 / 4


def test_rows_with_labels_come_in_order_and_send_their_gradients_back():
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    labels = torch.tensor([[-100, 5, -100], [2, -100, 9]])
    rows, targets = ops.labelled_rows(hidden, labels)
    assert targets.tolist() == [5, 2, 9]
    assert torch.equal(rows, torch.stack([hidden[0, 1], hidden[1, 0], hidden[1, 2]]))
    rows.sum().backward()
    assert torch.equal(hidden.grad, (labels != -100).float().unsqueeze(-1).expand(2, 3, 4))
    assert ops.labelled_rows(hidden, torch.full((2, 3), 7), ignore_index=7)[0].shape == (0, 4)
    with pytest.raises(ValueError, match=r"labels have shape \[3, 2\], expected \[2, 3\], one for each"):
        ops.labelled_rows(hidden, labels.t())


def test_errors_name_the_row_among_all_and_the_bias():
    hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(IndexError, match="target 9 of row 2 is not a class"):
        ops.linear_cross_entropy(hidden, weight, torch.tensor([-100, 1, 9]))
    with pytest.raises(ValueError, match=r"bias has shape \[4\], expected \[5\], one per row of weight"):
        ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]), bias=torch.zeros(4))


class Masked(nn.Module):
    """A masked-language model: its transform and its head, tied to the embedding, see labelled rows alone."""

    def __init__(self, sparse=True):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.transform = nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(64))
        self.sparse = sparse

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.h:
            x = x + torch.tanh(layer(x))
        if self.sparse:
            x, labels = ops.labelled_rows(x, labels)
            return ops.linear_cross_entropy(self.transform(x), self.embed.weight, labels, bias=self.bias)
        logits = F.linear(self.transform(x), self.embed.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_heads_train_as_whole_ones_do(bf16):
    tokens = torch.arange(128).view(2, 64) % 64
    labels = torch.where(tokens % 7 == 3, tokens, -100)

    def losses(world, stage, sparse):
        model = models.make_model(kind=Masked, sparse=sparse)
        config = models.config(stage, world=world.size, bf16=bf16)
        engine, *_ = deeptide.initialize(model=model, config=config, world=world)
        seen = []
        for _ in range(4):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        engine.destroy()
        return seen

    whole, sharded = run_ranks(2, losses, 0, True), run_ranks(2, losses, 3, True)
    dense = run_ranks(2, losses, 0, False)
    assert whole == sharded
    assert whole[0] == pytest.approx(dense[0], rel=2e-2 if bf16 else 1e-5)
    assert whole[0][-1] < whole[0][0]
