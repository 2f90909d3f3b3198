# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights that a backward leaves out, to be computed later: ZB-H1 of arXiv:2401.10241.

Products of an activation with a weight are recorded by a function whose backward gives the activation's gradient alone.
It keeps both factors of the weight's gradient, which is their product.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deeptide._model.products import Layout, Pairs, Weight
from deeptide.pipeline.errors import PipelineError

# Takes the gradient left @ right of a weight, as PipelineStage.add_product does. False: it does not.
TakeProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


def _takes_none(*_: torch.Tensor) -> bool:
    return False


_CURE = 'take "schedule": "1f1b"'


class _Product(torch.autograd.Function):
    """An activation times a weight. The weight comes in a tuple, which autograd does not look into."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, weight: Weight, aside: SetAside) -> torch.Tensor:
        """Under autocast in its type, in which the inputs are then kept."""
        dtype = _autocast_dtype(inputs)
        context.weight, context.aside, context.dtype = weight, aside, inputs.dtype
        kept = inputs if dtype is None else inputs.to(dtype)
        context.layout = Layout.of(kept)
        context.save_for_backward(kept)
        with torch.enable_grad():  # sharded weights tell training from evaluation by it; nothing here has a graph
            return weight.product(kept.detach(), dtype)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of the inputs; the weight's is set aside."""
        (inputs,) = context.saved_tensors
        context.aside.add(context.weight, inputs, gradient)
        return context.weight.input_gradient(context.layout, gradient).to(context.dtype), None, None


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


# The functions that are looked at: names of their arguments, and the place of (inputs, weight, bias) among them.
_LINEAR = (("input", "weight", "bias"), ("input", "weight", "bias"))
_ADDMM = (("input", "mat1", "mat2"), ("mat1", "mat2", "input"))
_MM = (("input", "mat2"), ("input", "mat2", ""))
_MATMUL = (("input", "other"), ("input", "other", ""))
_FUNCTIONS: dict[Callable[..., Any], tuple[tuple[str, ...], tuple[str, str, str]]] = {
    F.linear: _LINEAR,
    torch.addmm: _ADDMM,
    torch.mm: _MM,
    torch.matmul: _MATMUL,
    torch.Tensor.mm: _MM,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
}


def _run_backward(tensors: Any, gradients: Any = None, retain_graph: bool | None = None, **more: Any) -> bool:
    """A backward that a program starts, as a checkpoint does within another one. False: it is an unusual one."""
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    gradients = (gradients,) if gradients is None or isinstance(gradients, torch.Tensor) else tuple(gradients)
    is_plain = not any(more.values()) and len(gradients) == len(tensors)
    if not is_plain or any(gradient is None and tensor.numel() != 1 for tensor, gradient in zip(tensors, gradients)):
        return False
    gradients = tuple(torch.ones_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True))
    run = torch.autograd.Variable._execution_engine.run_backward
    run(tensors, gradients, bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True)
    return True


# Torch runs these without the modes that are on, so that a recomputation within would not be seen.
_BACKWARDS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.autograd.backward: ("tensors", "gradients", "retain_graph", "create_graph", "grad_variables", "inputs"),
    torch.Tensor.backward: ("tensors", "gradients", "retain_graph", "create_graph", "inputs"),
}
_GRADIENTS = {"grad_tensors": "gradients", "gradient": "gradients"}  # their keywords


class _Watch(TorchFunctionMode):
    """Sees each of torch's functions that Python calls."""

    def __init__(self, aside: SetAside) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._aside = aside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            given = dict(zip(_BACKWARDS[func], args, strict=False))
            given |= {_GRADIENTS.get(name, name): value for name, value in kwargs.items()}
            with self:
                has_run = _run_backward(**given)
            return None if has_run else func(*args, **kwargs)
        known = _FUNCTIONS.get(func)
        if known is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        names, places = known
        given = dict(zip(names, args, strict=False)) | kwargs
        inputs, weight, bias = (given.pop(place, None) for place in places)
        if given or not self._aside.takes(inputs, weight, bias):
            return func(*args, **kwargs)
        product: Callable[..., torch.Tensor] = _Product.apply
        return product(inputs, Weight(weight, bias, func is F.linear), self._aside)


class _Later(NamedTuple):
    """A weight's gradient that is to be computed."""

    weight: Weight
    inputs: torch.Tensor  # (…, I)
    gradient: torch.Tensor  # (…, O), of the product
    versions: tuple[int, int]

    def gradients(self, take: TakeProduct) -> Pairs:
        """Those of weight and bias that `take` did not take. Errors: PipelineError if a factor was written since."""
        if (self.inputs._version, self.gradient._version) != self.versions:
            raise PipelineError(
                f"the zero_bubble schedule: what a weight of shape {tuple(self.weight.weight.shape)} was multiplied "
                "with was written in place between the backward of a micro-batch and the gradient of the weight; write "
                f"copies, or {_CURE}"
            )
        leaf = self.weight.weight
        factors = self.weight.factors(self.inputs, self.gradient)
        lies_alike = not factors.is_transposed and factors.left.dtype == leaf.dtype
        if lies_alike and take(leaf, factors.left, factors.right):
            return self.weight.bias_gradient(self.inputs, self.gradient)
        return self.weight.own_gradients(self.inputs, self.gradient)


class SetAside:
    """Keeps what backward of one stage leaves to be computed, by micro-batch."""

    def __init__(self, take: TakeProduct = _takes_none) -> None:
        """take: asked for each weight that has one gradient in a micro-batch."""
        self._take = take
        self._watch = _Watch(self)
        self._lent: frozenset[int] = frozenset()
        self._later: dict[int, deque[_Later]] = {}
        self._open: int | None = None  # the micro-batch whose backward runs

    def begin(self, lent: list[torch.Tensor]) -> None:
        """Before a step: forgets the one before. `lent`: weights of other stages, which are no parameters here."""
        self._later.clear()
        self._lent = frozenset(map(id, lent))

    def forward(self) -> AbstractContextManager[Any]:
        """Around a forward of a micro-batch."""
        return self._watch

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Around a backward, which may compute a forward again."""
        self._open = micro_batch
        self._later[micro_batch] = deque()
        try:
            with self._watch:
                yield
        finally:
            self._open = None

    def takes(self, inputs: Any, weight: Any, bias: Any) -> bool:
        """Whether it is a product of an activation with a weight that is trained, and plain enough."""
        return (
            self._is_weight(weight, 2)
            and weight.requires_grad
            and type(inputs) in (torch.Tensor, torch.nn.Parameter)
            and inputs.requires_grad
            and inputs.dim() >= 2
            and inputs.is_floating_point()
            and inputs.layout == torch.strided
            and inputs.numel() > 0
            and inputs.device == weight.device
            and (inputs.dtype == weight.dtype or _autocast_dtype(inputs) is not None)
            and (bias is None or (self._is_weight(bias, 1) and bias.dtype == weight.dtype))
            and not torch.compiler.is_compiling()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def _is_weight(self, tensor: Any, dimensions: int) -> bool:
        is_held = type(tensor) is torch.nn.Parameter or (type(tensor) is torch.Tensor and id(tensor) in self._lent)
        return is_held and tensor.dim() == dimensions and tensor.numel() > 0

    def add(self, weight: Weight, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """In a backward. Errors: PipelineError if that is not the engine's, or makes a graph."""
        if self._open is None or torch.is_grad_enabled():
            raise PipelineError(
                "the zero_bubble schedule sets gradients of weights aside, and the model differentiates what a weight "
                f"gives by itself, as by torch.autograd.grad, in its forward or with create_graph; {_CURE}"
            )
        self._later[self._open].append(_Later(weight, inputs, gradient, (inputs._version, gradient._version)))

    def gradients(self, micro_batch: int, besides: Pairs) -> Iterator[Pairs]:
        """Computes what was set aside, weight by weight, each once; frees the factors on the way. Gives what is left.

        besides: gradients from elsewhere, which are added to those of the same leaf.
        """
        later = self._later.pop(micro_batch, deque())
        due = Counter(id(leaf) for each in later for leaf in (each.weight.weight, each.weight.bias))
        due.update(id(leaf) for leaf, _ in besides)
        is_only = {leaf for leaf, count in due.items() if count == 1}
        sums: dict[int, torch.Tensor] = {}
        arriving: list[Pairs] = [besides] if besides else []
        while arriving or later:
            with torch.no_grad():
                pairs = arriving.pop() if arriving else self._computed(later.popleft(), is_only)
                ready = []
                for leaf, gradient in pairs:
                    held = sums.pop(id(leaf), None)
                    gradient = gradient if held is None else held + gradient
                    due[id(leaf)] -= 1
                    if due[id(leaf)]:
                        sums[id(leaf)] = gradient
                    else:
                        ready.append((leaf, gradient))
            if ready:
                yield ready

    def _computed(self, each: _Later, is_only: set[int]) -> Pairs:
        return each.gradients(self._take if id(each.weight.weight) in is_only else _takes_none)
