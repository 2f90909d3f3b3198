# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.ops beside the same in fp64: values, gradients, shapes at the edge, errors, and life under the gate."""

import models
import pytest
import torch
import torch.nn.functional as F
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import ops

TYPES = [torch.float32, torch.bfloat16]
# Relative to the largest value, 0.1 at least (softmax - 1 cancels): fp32 sums of up to 8192 products; bf16 has 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def close(got, expected, dtype):
    got, expected = got.detach().double(), expected.detach()
    assert got.shape == expected.shape
    if got.numel() > 0:
        limit = TOLERANCE[dtype] * max(0.1, float(expected.abs().max()))
        assert float((got - expected).abs().max()) <= limit


def beside_fp64(function, reference, inputs, dtype, *rest):
    """Runs both on the same numbers (rounded to dtype first) and compares results and gradients."""
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    got, expected = function(*mine, *rest), reference(*exact, *rest)
    close(got, expected, dtype)
    weights = torch.randn_like(expected)
    (got * weights.to(got.dtype)).sum().backward()
    (expected * weights.to(got.dtype).double()).sum().backward()
    for x, y in zip(mine, exact, strict=True):
        assert x.grad.dtype == dtype
        close(x.grad, y.grad, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (15,), (16,), (17,), (3, 5, 7), (64, 1000)])
def test_gelu_tanh_agrees_with_fp64(shape, dtype):
    beside_fp64(ops.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [3 * torch.randn(shape)], dtype)


def test_gelu_tanh_holds_far_out_and_for_nan():
    x = torch.tensor([-1e30, -100.0, -10.0, 0.0, 10.0, 100.0, 1e30, float("nan")], requires_grad=True)
    y = ops.gelu_tanh(x)
    y.sum().backward()
    torch.testing.assert_close(y[:-1], F.gelu(x, approximate="tanh")[:-1], rtol=1e-6, atol=1e-30)
    assert y[-1].isnan() and x.grad[-1].isnan()
    assert x.grad[1:-2].tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(256, 512, 300), (3, 700, 513), (1, 64, 64), (0, 64, 64)])
def test_linear_agrees_with_fp64(shape, bias, dtype):
    rows, inside, outside = shape
    inputs = [torch.randn(rows, inside), torch.randn(outside, inside)] + [torch.randn(outside)] * bias
    beside_fp64(ops.linear, F.linear, inputs, dtype)


def test_linear_takes_any_leading_shape_and_strides():
    x = torch.randn(4, 512, 64).transpose(1, 2)  # (4, 64, 512)
    beside_fp64(ops.linear, F.linear, [x, torch.randn(512, 300).t()], torch.float32)
    assert ops.linear(torch.ones(512), torch.ones(300, 512)).shape == (300,)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (7, 17), (4, 1000), (33, 8192)])
def test_cross_entropy_agrees_with_fp64(shape, reduction, smoothing, dtype):
    rows, classes = shape
    targets = torch.randint(0, classes, (rows,))
    targets[::3] = -100 if rows > 1 else targets[0]
    extra = {"reduction": reduction, "label_smoothing": smoothing}
    beside_fp64(
        lambda x, y: ops.cross_entropy(x, y, **extra),
        lambda x, y: F.cross_entropy(x, y, **extra),
        [4 * torch.randn(shape) + 20],
        dtype,
        targets,
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(5, 32, 40), (300, 16, 33_000)])  # the second in two or more chunks
def test_linear_cross_entropy_agrees_with_fp64(shape, reduction, dtype):
    rows, width, classes = shape
    targets = torch.randint(0, classes, (rows,))
    targets[1] = 7
    hidden, weight = torch.randn(rows, width), 0.3 * torch.randn(classes, width)
    extra = {"reduction": reduction, "ignore_index": 7, "label_smoothing": 0.1}
    beside_fp64(
        lambda h, w, y: ops.linear_cross_entropy(h, w, y, **extra),
        lambda h, w, y: F.cross_entropy(F.linear(h, w), y, **extra),
        [hidden, weight],
        dtype,
        targets,
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_cross_entropy_of_nothing_is_torchs(dtype):
    logits = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    ignored = torch.full((3,), -100)
    loss = ops.cross_entropy(logits, ignored)
    loss.backward()
    assert loss.isnan() and torch.equal(logits.grad, torch.zeros_like(logits))
    none = torch.zeros(0, 4, dtype=dtype, requires_grad=True)
    loss = ops.cross_entropy(none, ignored[:0], reduction="sum")
    loss.backward()
    assert loss == 0 and none.grad.shape == (0, 4)
    weight = torch.zeros(6, 4, dtype=dtype, requires_grad=True)
    ops.linear_cross_entropy(none.detach(), weight, ignored[:0], reduction="sum").backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_cross_entropy_says_nan_where_torch_does():
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, nan] + [0.0] * 30, [inf] + [0.0] * 31, [-inf] * 32, [-inf] + [0.0] * 31]
    logits = torch.tensor(rows, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 3])
    mine, torchs = (f(logits, targets, reduction="none") for f in (ops.cross_entropy, F.cross_entropy))
    assert mine.isnan().tolist() == torchs.isnan().tolist() == [True, True, True, False]
    assert mine[3].item() == pytest.approx(torchs[3].item())
    mine.sum().backward()
    assert logits.grad[:3].isnan().all() and logits.grad[3].isfinite().all()


def test_gradients_survive_a_second_backward_and_a_scale():
    hidden = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    loss = ops.linear_cross_entropy(hidden, weight, torch.arange(6))
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close(weight.grad, 4 * once)


def test_doubles_take_torchs_way_and_its_derivatives():
    x = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
    w = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    y = torch.tensor([0, 4, -100, 2])
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(ops.gelu_tanh, x)
        assert check(ops.linear, (x, w))
        assert check(lambda a: ops.cross_entropy(a, y, label_smoothing=0.1), x)
        assert check(lambda a, b: ops.linear_cross_entropy(a, b, y), (x, w))


def test_gelu_and_linear_can_be_differentiated_twice_in_fp32():
    x, w = torch.randn(256, 256, requires_grad=True), torch.randn(256, 256, requires_grad=True)
    for linear, gelu in ((ops.linear, ops.gelu_tanh), (F.linear, lambda a: F.gelu(a, approximate="tanh"))):
        (first,) = torch.autograd.grad(gelu(linear(x, w)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w)
        if linear is ops.linear:
            kept = second
    assert float((kept - second).abs().max()) <= 1e-5 * float(second.abs().max())  # other sums of 256 products
    logits = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(ops.cross_entropy(logits, torch.tensor([0, 1])), logits, create_graph=True)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.zeros(2, 3, 4), torch.zeros(2).long()), ValueError, "two dimensions"),
        ((torch.zeros(2, 3), torch.zeros(3).long()), ValueError, r"targets have shape \[3\], expected \[2\]"),
        ((torch.zeros(2, 3), torch.zeros(2)), ValueError, "targets are Float, expected Long"),
        ((torch.zeros(2, 3), torch.tensor([0, 3])), IndexError, "target 3 of row 1 is no class, expected 0 to 2"),
        ((torch.zeros(2, 3), torch.tensor([-1, 0])), IndexError, "target -1 of row 0"),
        ((torch.zeros(2, 3), torch.tensor([0, 1]), -100, "max"), ValueError, "reduction is 'max'"),
        ((torch.zeros(2, 3), torch.tensor([0, 1]), -100, "mean", 1.5), ValueError, "label_smoothing is 1.5"),
    ],
)
def test_cross_entropy_says_what_is_wrong(arguments, error, text):
    with pytest.raises(error, match=text):
        ops.cross_entropy(*arguments)


def test_linear_cross_entropy_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"weight has shape \[5, 4\], expected \[classes, 3\]"):
        ops.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2).long())
    with pytest.raises(ValueError, match="reduction is None"):
        ops.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2).long(), reduction="none")
    with pytest.raises(RuntimeError):  # torch's own
        ops.linear(torch.zeros(2, 3), torch.zeros(5, 4))


def test_one_thread_and_two_give_the_same_bits():
    logits, targets = torch.randn(64, 3000), torch.randint(0, 3000, (64,))
    x = torch.randn(100_001)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        a, b = logits.clone().requires_grad_(), x.clone().requires_grad_()
        loss, y = ops.cross_entropy(a, targets), ops.gelu_tanh(b)
        (loss + y.sum()).backward()
        results.append((loss.detach(), a.grad, y.detach(), b.grad))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_transforms_autocast_and_compilation_take_torchs_way():
    x, w = torch.randn(8, 16), torch.randn(4, 16)
    y = torch.arange(8) % 4
    expected = F.cross_entropy(F.gelu(F.linear(x, w), approximate="tanh"), y)

    def loss(weight):
        return ops.cross_entropy(ops.gelu_tanh(ops.linear(x, weight)), y)

    torch.testing.assert_close(torch.func.vmap(loss)(w.expand(3, 4, 16)), expected.expand(3))
    assert torch.func.grad(loss)(w).shape == w.shape
    torch.testing.assert_close(torch.compile(loss, backend="eager")(w), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, w).dtype == torch.bfloat16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.h = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.embed(tokens).flatten(0, -2)
        for block in self.h:
            x = x + ops.gelu_tanh(ops.linear(x, block.weight, block.bias))
        return ops.linear_cross_entropy(x, self.embed.weight, targets.flatten())


def test_sharded_parameters_train_as_whole_ones_do():
    tokens, targets = torch.arange(128).view(2, 64) % 64, (torch.arange(128).view(2, 64) + 1) % 64

    def losses(world, stage):
        model = models.make_model(kind=Model)
        engine, *_ = deeptide.initialize(model=model, config=models.config(stage, world=world.size), world=world)
        seen = []
        for _ in range(4):
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        engine.destroy()
        return seen

    whole, sharded = run_ranks(2, losses, 0), run_ranks(2, losses, 3)
    assert whole == sharded
    assert whole[0][-1] < whole[0][0]
