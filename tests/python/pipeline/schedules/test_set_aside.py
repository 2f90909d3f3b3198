# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Products whose weight's gradient is set aside are torch's, bit for bit; what is no such product stays as it is."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import Parameter
from torch.nn import functional as F

from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.step.set_aside import SetAside

ROWS, INPUTS, OUTPUTS = 7, 33, 21
CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without a bias": lambda x, w, b: F.linear(x, w),
    "linear by names": lambda x, w, b: F.linear(weight=w, input=x, bias=b),
    "@": lambda x, w, b: x @ w,
    "matmul": lambda x, w, b: torch.matmul(x, other=w),
    "x.matmul": lambda x, w, b: x.matmul(w),
    "mm": lambda x, w, b: torch.mm(x.reshape(-1, INPUTS), w),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, INPUTS), w),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "rows in another order": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "part of a larger one": lambda x: torch.cat([x, x], -1)[..., :INPUTS],
}


def gradients(call, inputs, weight, bias, aside=None, autocast=False):
    """(output, gradients of inputs, weight and bias)."""
    x = inputs.detach().requires_grad_()
    w, b = (Parameter(t.clone(memory_format=torch.preserve_format)) for t in (weight, bias))
    with aside.forward() if aside else contextlib.nullcontext(), torch.autocast("cpu", enabled=autocast):
        out = call(x, w, b)
    loss = (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    with aside.backward(4) if aside else contextlib.nullcontext():
        loss.backward()
    if aside:
        assert w.grad is None and b.grad is None
        for pairs in aside.gradients(4, []):
            torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
    return out, x.grad, w.grad, b.grad


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "fp64", "autocast"])
@pytest.mark.parametrize("shape", [(ROWS,), (1,), (3, 5), (3, 1), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.costly
def test_products_and_gradients_are_torchs_bit_for_bit(name, shape, kind):
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    torch.manual_seed(3)
    is_linear = name.startswith("linear")
    inputs = torch.randn(*shape, INPUTS).to(kinds.get(kind, torch.float32))
    weight = torch.randn((OUTPUTS, INPUTS) if is_linear else (INPUTS, OUTPUTS)).to(inputs.dtype)
    bias = torch.randn(OUTPUTS).to(inputs.dtype)
    for layout in LAYOUTS.values():
        for w in (weight, weight.t().contiguous().t()):
            given = CALLS[name], layout(inputs), w, bias
            wanted = gradients(*given, autocast=kind == "autocast")
            for found, expected in zip(gradients(*given, SetAside(), kind == "autocast"), wanted, strict=True):
                assert (found is None) == (expected is None)
                assert found is None or (torch.equal(found, expected) and found.stride() == expected.stride())


class Model(torch.nn.Module):
    """Has one of each kind that is set aside, and some that are not."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.frozen_bias = torch.nn.Linear(4, 4)
        self.frozen_bias.bias.requires_grad_(False)
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.norm = torch.nn.LayerNorm(4)
        self.cube = Parameter(torch.randn(2, 4, 4))
        self.transposed = Parameter(torch.randn(4, 4))
        self.scaled = Parameter(torch.randn(4, 4))

    def forward(self, x):
        raw = F.linear(x.detach(), self.scaled)  # backward ends here: nothing to be early for
        x = self.norm(self.frozen(self.frozen_bias(self.linear(x).relu_())))
        x = torch.matmul(x, self.cube).sum(0) @ self.transposed.T
        return torch.addmm(x, x, self.scaled, beta=2.0) + raw

    def expected(self):
        return {"linear.weight", "linear.bias", "frozen_bias.weight"}


def run(model, x, aside):
    with aside.forward():
        loss = model(x.requires_grad_()).square().sum()
    with aside.backward(0):
        loss.backward()


def test_only_plain_products_with_trained_weights_are_set_aside():
    torch.manual_seed(3)
    model, aside, x = Model(), SetAside(), torch.randn(3, 4)
    model(x.requires_grad_()).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    run(model, x, aside)
    at_once = {name for name, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() - at_once == model.expected() and at_once
    later = {id(leaf): gradient for pairs in aside.gradients(0, []) for leaf, gradient in pairs}
    for name, p in model.named_parameters():
        found = later.get(id(p), p.grad)
        assert torch.equal(found, wanted[name]) if name in wanted else found is None


def test_uses_of_one_weight_come_as_one_gradient():
    torch.manual_seed(3)
    model, aside, x = torch.nn.Linear(4, 4), SetAside(), torch.randn(3, 4)
    run(lambda x: model(model(model(x))), x, aside)
    besides = torch.ones(4, 4)
    pairs = [pair for pairs in aside.gradients(0, [(model.weight, besides)]) for pair in pairs]
    assert [leaf is model.weight for leaf, _ in pairs].count(True) == 1 and len(pairs) == 2
    model(model(model(x))).square().sum().backward()
    found = dict(zip((id(leaf) for leaf, _ in pairs), (gradient for _, gradient in pairs), strict=True))
    torch.testing.assert_close(found[id(model.weight)], model.weight.grad + 1)
    assert torch.equal(found[id(model.bias)], model.bias.grad)
    assert list(aside.gradients(1, [(model.weight, besides)])) == [[(model.weight, besides)]]


def test_factors_are_freed_as_gradients_are_computed():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    aside, alive = SetAside(), []
    aside_add = aside.add

    def add(weight, inputs, gradient):
        alive.append(weakref.ref(gradient))
        aside_add(weight, inputs, gradient)

    aside.add = add
    run(model, torch.randn(3, 4), aside)
    gc.collect()
    assert len(alive) == 3 and all(reference() is not None for reference in alive)
    for count, _ in enumerate(aside.gradients(0, [])):
        assert [reference() is None for reference in alive] == [True] * (count + 1) + [False] * (2 - count)


def test_functions_of_torch_func_and_inner_derivatives():
    model, aside, x = torch.nn.Linear(4, 4), SetAside(), torch.randn(3, 4, requires_grad=True)
    with aside.forward():
        jacobian = torch.func.jacrev(model)(x)
    assert torch.equal(jacobian[0, :, 0], model.weight)
    text = "the model differentiates what a weight gives by itself, as by torch.autograd.grad"
    with aside.forward(), pytest.raises(PipelineError, match=text):
        torch.autograd.grad(model(x).sum(), x)
    with aside.forward():
        loss = model(x).sum()
    with aside.backward(0), pytest.raises(PipelineError, match=text):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_factor_that_was_written_is_named():
    model, aside = torch.nn.Linear(4, 4), SetAside()
    run(lambda x: model(x + 0), torch.randn(3, 4), aside)
    factors = aside._later[0][0]
    with torch.no_grad():
        factors.inputs.add_(1)
    with pytest.raises(PipelineError, match=r"what a weight of shape \(4, 4\) was multiplied with was written"):
        list(aside.gradients(0, []))


def test_recomputation_passes_the_same_way():
    torch.manual_seed(3)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), torch.randn(3, 4)
    model(x).square().sum().backward()
    wanted = [p.grad for p in model.parameters()]
    for reentrant in (False, True):
        model.zero_grad()
        aside, calls = SetAside(), []
        handle = model[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        run(lambda x, r=reentrant: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=r), x.clone(), aside)
        handle.remove()
        assert len(calls) == 2 and all(p.grad is None for p in model.parameters())
        later = {id(leaf): gradient for pairs in aside.gradients(0, []) for leaf, gradient in pairs}
        assert all(torch.equal(later[id(p)], grad) for p, grad in zip(model.parameters(), wanted, strict=True))
        assert len(calls) == 2  # the gradients of weights compute no forward


def test_compiled_parts_stay_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled, aside, x = torch.compile(model, backend="eager"), SetAside(), torch.randn(3, 4)
    run(compiled, x, aside)
    later = {id(leaf): gradient for pairs in aside.gradients(0, []) for leaf, gradient in pairs}
    found = [later.get(id(p), p.grad) for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))
