# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.ops beside the same in fp64: values, gradients, shapes at the edge, errors, and life under the gate."""

import math

import models
import pytest
import torch
import torch.nn.functional as F
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import ops

pytestmark = pytest.mark.usefixtures("own_numbers")

TYPES = [torch.float32, torch.bfloat16]
# Relative to the largest value, 0.1 at least (softmax - 1 cancels): fp32 sums of up to 8192 products; bf16 has 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def close(got, expected, dtype, least=0.1):
    got, expected = got.detach().double(), expected.detach()
    assert got.shape == expected.shape
    if got.numel() > 0:
        limit = TOLERANCE[dtype] * max(least, float(expected.abs().max()))
        assert float((got - expected).abs().max()) <= limit


def beside_fp64(function, reference, inputs, dtype, *rest, least=0.1):
    """Runs both on the same numbers (rounded to dtype first) and compares results and gradients.

    least: as large a value as gradients are sums of, where these may cancel.
    """
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    got, expected = function(*mine, *rest), reference(*exact, *rest)
    close(got, expected, dtype)
    weights = torch.randn_like(expected)
    (got * weights.to(got.dtype)).sum().backward()
    (expected * weights.to(got.dtype).double()).sum().backward()
    for x, y in zip(mine, exact, strict=True):
        assert x.grad.dtype == dtype
        close(x.grad, y.grad, dtype, least)


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


def attention_masks(queries, keys):
    """Masks by what they are: none, added, for each head, and true where a key is seen."""
    added = torch.randn(2, 1, 1, keys).clamp(max=1.0)
    each = torch.full((queries, keys), -torch.inf).triu(1)
    return {"none": None, "added": added, "matrix": each, "seen": torch.rand(2, 3, queries, keys) < 0.8}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["none", "added", "matrix", "seen", "causal"])
@pytest.mark.parametrize("sizes", [(1, 1, 4), (9, 9, 8), (7, 33, 16), (200, 200, 64), (20, 1100, 16)])
def test_attention_agrees_with_fp64(sizes, kind, dtype, monkeypatch):
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 4e-2)  # scores, shares and their gradients are rounded on the way
    queries, keys, width = sizes
    causal, mask = kind == "causal", attention_masks(queries, keys).get(kind)
    if kind == "seen":
        mask[..., 0] = True
    inputs = [torch.randn(2, count, 3, width).transpose(1, 2) for count in (queries, keys, keys)]

    def torchs(query, key, value):
        exact = mask.double() if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(query, key, value, exact, is_causal=causal)

    def ours(query, key, value):
        typed = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        return ops.attention(query, key, value, typed, causal)

    # A score's gradient is the difference of two products with a value. A single key leaves nothing but their rounding
    # in torch's kernel, which fp32 goes to; ours cancels exactly.
    beside_fp64(ours, torchs, inputs, dtype, least=1.0 if keys == 1 and dtype == torch.float32 else 0.1)


def test_attention_has_a_second_derivative_and_torchs_errors():
    inputs = [torch.randn(1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    seconds = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch's fused one has none
        for function in (ops.attention, F.scaled_dot_product_attention):
            first = torch.autograd.grad(function(*inputs).float().square().sum(), inputs, create_graph=True)
            seconds.append(torch.autograd.grad(sum(g.float().square().sum() for g in first), inputs))
    for mine, torchs in zip(*seconds, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0.1, atol=0.1 * float(torchs.abs().max()))
    with pytest.raises(RuntimeError):
        ops.attention(inputs[0], torch.randn(1, 2, 5, 4, dtype=torch.bfloat16), inputs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", ["min", "inf", -2e4])
def test_a_row_whose_keys_are_all_masked_has_the_gradients_of_equal_shares(low, dtype):
    """Padding's rows. torch's own backward on a CPU multiplies by the count of keys.

    The lowest value makes all shares equal, for scores vanish beside it; a smaller one leaves them to the scores.
    """
    torch.manual_seed(0)
    q, k, v, seen = (torch.randn(2, 3, 6, 8).to(dtype) for _ in range(4))
    value = {"min": torch.finfo(dtype).min, "inf": float("-inf")}.get(low, low)
    mask = torch.zeros(2, 1, 6, 6, dtype=dtype)
    mask[:, :, :, 4:] = value
    mask[:, :, 2] = value
    if low == "inf":
        mask[:, :, 2, 0] = 0  # a row of infinities alone is nan everywhere
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    ops.attention(*ours, mask=mask).backward(seen)
    wide = [t.detach().double().requires_grad_() for t in theirs]
    scores = wide[0] @ wide[1].transpose(2, 3) / math.sqrt(8)
    if low == "min":
        scores = scores.masked_fill(torch.arange(6)[:, None] == 2, 0.0)
    (torch.softmax(scores + mask.double(), -1) @ wide[2]).backward(seen.double())
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    for got, expected in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=bound, atol=bound)


def test_attention_gives_a_learned_mask_its_gradient():
    inputs = [torch.randn(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.randn(1, 2, 5, 5, dtype=torch.bfloat16, requires_grad=True)
    ops.attention(*inputs, bias).sum().backward()
    assert bias.grad.abs().sum() > 0


NORM_SHAPES = [
    ((1, 1), 1),
    ((5, 1), 1),
    ((7, 15), 1),
    ((3, 2, 16), 1),
    ((33, 17), 1),
    ((130, 512), 1),
    ((2, 3, 4, 5), 2),
]
NORM_SHAPES += [((3, 5000), 1)]  # more than one block of a row's sums


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", "neither"])
@pytest.mark.parametrize(("shape", "dimensions"), NORM_SHAPES)
def test_layer_norm_agrees_with_fp64(shape, dimensions, given, dtype):
    inside = shape[-dimensions:]
    parameters = [torch.randn(inside) for name in ("weight", "bias") if name in given]

    def norm(function):
        def run(x, *rest):
            by_name = dict(zip([name for name in ("weight", "bias") if name in given], rest, strict=True))
            return function(x, inside, by_name.get("weight"), by_name.get("bias"), 1e-3)

        return run

    beside_fp64(norm(ops.layer_norm), norm(F.layer_norm), [torch.randn(shape) + 3, *parameters], dtype)


def residual_norms(x, residual, weight, bias):
    """One tensor of both results, so that both get gradients."""
    return torch.cat(ops.residual_layer_norm(x, residual, weight.shape, weight, bias))


def residual_norms_by_torch(x, residual, weight, bias):
    # bf16 rounds the sum before it is normalized, and so does the reference.
    summed = x + residual
    return torch.cat([F.layer_norm(summed, weight.shape, weight, bias), summed])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "dimensions"), NORM_SHAPES)
def test_residual_layer_norm_agrees_with_fp64(shape, dimensions, dtype):
    inside = shape[-dimensions:]
    # Sums of sixteenths below 8 are exact in bf16: the reference normalizes the same numbers.
    x, residual = (torch.randint(-60, 60, shape) / 16 for _ in range(2))
    inputs = [x, residual, torch.randn(inside), torch.randn(inside)]
    beside_fp64(residual_norms, residual_norms_by_torch, inputs, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm_is_as_accurate_as_torchs(dtype):
    """Over many draws: in a single one, by which way a row's mean was rounded, either may be the more accurate."""
    generator = torch.Generator().manual_seed(0)
    mine, torchs = 0.0, 0.0
    for _ in range(40):
        x = (100 + torch.randn(64, 1000, generator=generator)).to(dtype)
        exact = F.layer_norm(x.double(), (1000,))
        mine += float((ops.layer_norm(x, (1000,)) - exact).square().sum())
        torchs += float((F.layer_norm(x, (1000,)) - exact).square().sum())
    assert math.sqrt(mine) <= 1.1 * math.sqrt(torchs)


@pytest.mark.parametrize("dtype", TYPES)
def test_residual_layer_norm_gives_each_gradient_alone(dtype):
    for use in (0, 1):
        x, residual, weight, bias = (torch.randn(s).to(dtype).requires_grad_() for s in ((9, 33), (9, 33), 33, 33))
        results = [
            torch.autograd.grad(f(x, residual, weight, bias).chunk(2)[use].sum(), (x, residual), allow_unused=True)
            for f in (residual_norms, residual_norms_by_torch)
        ]
        for mine, torchs in zip(*results, strict=True):
            close(mine, torchs.double(), dtype)
        # An unused output gets no gradient at all.
        normed, summed = ops.residual_layer_norm(x, residual, (33,), weight, bias)
        got = torch.autograd.grad((normed, summed)[use].sum(), (residual, weight, bias), allow_unused=True)
        assert (got[1] is None) == (got[2] is None) == (use == 1)


def test_layer_norm_computes_only_the_gradients_asked_for():
    x, residual, weight, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8), torch.randn(8, requires_grad=True)
    ops.residual_layer_norm(x, residual, (8,), weight, bias)[0].sum().backward()
    assert bias.grad.tolist() == [4.0] * 8 and weight.grad is None
    bias.grad = None
    ops.layer_norm(x, (8,), None, bias)[:3].sum().backward()
    assert bias.grad.tolist() == [3.0] * 8


def test_layer_norm_takes_any_strides_and_mixed_parameters():
    # Three elements of a row are apart: a small deviation would multiply what rounding leaves.
    apart = torch.randn(6, 5, 40) + 3 * torch.arange(5.0)[:, None]
    x, residual = apart.transpose(1, 2)[..., ::2], torch.randn(40, 6, 3).permute(1, 0, 2)
    weight, bias = torch.randn(6)[::2], torch.randn(3)
    beside_fp64(residual_norms, residual_norms_by_torch, [x, residual, weight, bias], torch.float32)
    half = x.to(torch.bfloat16)  # with parameters in fp32, as torch allows
    leaf = weight.detach().clone().requires_grad_()
    y = ops.layer_norm(half, (3,), leaf, bias)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and leaf.grad.dtype == torch.float32
    torch.testing.assert_close(y, F.layer_norm(half, (3,), weight, bias), rtol=1e-2, atol=1e-2)


def test_layer_norm_of_nothing_and_of_nan_is_torchs():
    none = torch.zeros(0, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    ops.layer_norm(none, (8,), weight).sum().backward()
    assert none.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros(8))
    assert [y.shape for y in ops.residual_layer_norm(none, none, (8,))] == [(0, 8), (0, 8)]
    x = torch.randn(3, 20)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    torch.testing.assert_close(ops.layer_norm(x, (20,)), F.layer_norm(x, (20,)), equal_nan=True)


def test_layer_norm_can_be_differentiated_twice():
    inputs = [torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((2, 3, 5), (2, 3, 5), 5, 5)]
    assert torch.autograd.gradcheck(residual_norms, inputs) and torch.autograd.gradgradcheck(residual_norms, inputs)
    seconds = []
    for function in (residual_norms, residual_norms_by_torch):
        leaves = [x.detach().float().requires_grad_() for x in inputs]
        (first,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaves[:3]))
    for mine, torchs in zip(*seconds, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-4)  # of terms that cancel


def test_layer_norm_says_what_torch_says():
    for function in (ops.layer_norm, F.layer_norm):
        with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[5\]"):
            function(torch.zeros(2, 3), (5,))
        with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
            function(torch.zeros(2, 3), (3,), torch.ones(5))
    with pytest.raises(RuntimeError, match="must match the size"):
        ops.residual_layer_norm(torch.zeros(2, 3), torch.zeros(2, 4), (3,))
    x, row = torch.randn(2, 3), torch.randn(3)  # broadcast, as torch's sum
    assert torch.equal(ops.residual_layer_norm(x, row, (3,))[1], x + row)


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
        ((torch.zeros(2, 3), torch.tensor([0, 3])), IndexError, "target 3 of row 1 is not a class, expected 0 to 2"),
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
    x, weight, bias = torch.randn(100_001), torch.randn(1100), torch.randn(1100)
    rows, residual = torch.randn(2, 261, 1100)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        a, b = logits.clone().requires_grad_(), x.clone().requires_grad_()
        loss, y = ops.cross_entropy(a, targets), ops.gelu_tanh(b)
        (loss + y.sum()).backward()
        leaves = [t.clone().requires_grad_() for t in (rows, residual, weight, bias)]
        norms = residual_norms(*leaves)
        norms.square().sum().backward()
        results.append((loss.detach(), a.grad, y.detach(), b.grad, norms.detach(), *(t.grad for t in leaves)))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_transforms_autocast_and_compilation_take_torchs_way():
    x, w = torch.randn(8, 16), torch.randn(4, 16)
    y = torch.arange(8) % 4
    hidden = 2 * F.gelu(F.linear(x, w), approximate="tanh")
    expected = F.cross_entropy(F.layer_norm(F.layer_norm(hidden, (4,)), (4,)) + hidden, y)

    def loss(weight):
        hidden = ops.gelu_tanh(ops.linear(x, weight))
        normed, summed = ops.residual_layer_norm(hidden, hidden, (4,))
        return ops.cross_entropy(ops.layer_norm(normed, (4,)) + summed, y)

    torch.testing.assert_close(torch.func.vmap(loss)(w.expand(3, 4, 16)), expected.expand(3))
    assert torch.func.grad(loss)(w).shape == w.shape
    torch.testing.assert_close(torch.compile(loss, backend="eager")(w), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, w).dtype == torch.bfloat16
        half = x.to(torch.bfloat16)
        assert ops.layer_norm(half, (16,)).dtype == F.layer_norm(half, (16,)).dtype
    assert ops.residual_layer_norm(x.to("meta"), x.to("meta"), (16,))[0].shape == x.shape


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.h = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(3))
        self.norm = nn.LayerNorm(128)

    def forward(self, tokens, targets):
        x = self.embed(tokens).flatten(0, -2)
        for block, norm in zip(self.h, self.norms, strict=True):
            y = ops.gelu_tanh(ops.linear(x, block.weight, block.bias))
            y, x = ops.residual_layer_norm(x, y, (128,), norm.weight, norm.bias)
            x = x + y
        x = ops.layer_norm(x, (128,), self.norm.weight, self.norm.bias)
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
