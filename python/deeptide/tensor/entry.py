# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The way of activations into layers that ranks share, and of the sum of their gradients out of them.

Layers that take the same activation, such as queries, keys and values, enter it once: one sum goes back for all. It
travels while the gradients of their weights are computed. Autograd runs what is ready in the order of the nodes'
numbers, the latest first:

    forward    x → wait → send → x' → each layer's product
    backward   the products' input gradients; send begins the sum; the weights' gradients; wait ends the sum
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from deeptide import _C
from deeptide._model.products import Layout, Weight
from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor.cutting.slices import rows_of
from deeptide.tensor.team import Team

_FIRST = 2**64 - 2  # a node's number: before all that are not torch's own sums into a leaf


class _Return:
    """The sum of an activation's gradients, on its way."""

    def __init__(self, team: Team, dim: int | None) -> None:
        self.team, self.dim = team, dim
        self.sum: _C.TensorTeam.Sum | None = None

    def start(self, gradient: torch.Tensor) -> None:
        if self.dim is None:
            self.sum = self.team.core.start_all_reduce(gradient, "backward")
        else:
            self.sum = self.team.core.start_reduce_scatter(rows_of(gradient, self.team, self.dim), "backward")

    def wait(self) -> torch.Tensor:
        assert self.sum is not None
        result, self.sum = self.sum.wait(), None
        return result


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Return, whole: torch.Tensor | None) -> torch.Tensor:
        ctx.way = way
        if whole is not None:
            return whole.detach()
        if way.dim is None:
            return x.detach()  # no view: the entry would keep its key alive
        return torch.cat(way.team.core.all_gather(x, "forward").unbind(0), way.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.way.wait(), None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Return) -> torch.Tensor:
        ctx.way = way
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.way.start(gradient)
        return gradient, None


class _Parts:
    """This rank's positions of what layers take whole: forward keeps them alone, backward joins them once for all."""

    def __init__(self, part: torch.Tensor, team: Team, dim: int) -> None:
        self.part, self.users = part, 0
        self._team, self._dim, self._left = team, dim, 0
        self._whole: torch.Tensor | None = None

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, for one more of the users. Collective where it is the first of a backward."""
        if self._whole is None:
            self._whole = torch.cat(self._team.core.all_gather(part, "backward").unbind(0), self._dim)
            self._left = self.users
        whole, self._left = self._whole, self._left - 1
        if self._left == 0:
            self._whole = None
        return whole


class _ForWeight(torch.autograd.Function):
    """A product whose backward gives its weight's gradient alone. It returns a token of the shape, without values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Weight,
        parts: _Parts | None,
    ) -> torch.Tensor:
        ctx.product, ctx.parts = product, parts
        if parts is not None:
            parts.users += 1
        ctx.save_for_backward(x if parts is None else parts.part)
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0 if product.is_linear else 1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        x = kept if ctx.parts is None else ctx.parts.joined(kept)
        own = dict(zip(("weight", "bias"), ctx.product.own_gradients(x, gradient), strict=False))
        return None, own["weight"][1], own["bias"][1] if "bias" in own else None, None, None


class _ForInput(torch.autograd.Function):
    """The same product, whose backward gives its input's gradient, and passes its own on to the token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, product: Weight) -> torch.Tensor:
        ctx.product, ctx.layout = product, Layout.of(x)
        with torch.enable_grad():  # sharded weights tell training from evaluation by it; nothing here has a graph
            return product.product(x.detach(), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return ctx.product.input_gradient(ctx.layout, gradient), gradient, None


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An activation that has entered the layers of a team."""

    way: tuple[Any, ...]
    entered: torch.Tensor
    after_send: int | None  # a node's number: between `wait` and what comes later. None: no gradient goes back
    parts: _Parts | None = None  # where it can be joined again


_entries = WeakTensorKeyDictionary()  # by the activation, as long as that lives
# Likewise of leaves, such as inputs that want a gradient. Their graphs end in them, so an entry would keep its key: the
# nodes of the layers that took it keep it instead.
_entries_of_leaves = WeakTensorKeyDictionary()


def _last(x: torch.Tensor) -> _Entry | None:
    weakly: Any = _entries_of_leaves.get(x)
    last: _Entry | None = _entries.get(x) if weakly is None else weakly()
    return last


def _keep(product: torch.Tensor, entry: _Entry) -> torch.Tensor:
    """Lets the entry live as long as the product's node. Returns the product."""
    node: Any = product.grad_fn
    if node is not None:
        node.metadata["deeptide.entry"] = entry
    return product


def _way(x: torch.Tensor, team: Team, dim: int | None) -> tuple[Any, ...]:
    return team, dim, torch.is_grad_enabled(), None if x.is_inference() else x._version


def _enter(x: torch.Tensor, team: Team, dim: int | None) -> _Entry:
    way = _way(x, team, dim)
    last = _last(x)
    if last is not None and last.way == way:
        return last
    entry = _entry(x, way, _Return(team, dim))
    if x.is_leaf and entry.after_send is not None:
        _entries_of_leaves[x] = weakref.ref(entry)
    else:
        _entries[x] = entry
    return entry


def known_as(whole: torch.Tensor, part: torch.Tensor, team: Team, dim: int) -> None:
    """Tells that `whole` is all ranks' positions of `part` along a dimension, joined already.

    Layers of the team that it enters send each rank its positions of their gradients' sum, past the joining. What else
    uses it sends gradients through that.
    """
    entry = _entry(part, _way(whole, team, None), _Return(team, dim), whole.detach())
    _entries[whole] = dataclasses.replace(entry, parts=_Parts(part.detach(), team, dim))


def _entry(x: torch.Tensor, way: tuple[Any, ...], back: _Return, whole: torch.Tensor | None = None) -> _Entry:
    waiting: torch.Tensor = _Wait.apply(x, back, whole)  # type: ignore[no-untyped-call]
    if not waiting.requires_grad:
        return _Entry(way, waiting, None)
    sending: torch.Tensor = _Send.apply(waiting, back)  # type: ignore[no-untyped-call]
    node: Any = sending.grad_fn
    after: int = node._sequence_nr()
    _run_at(sending, _FIRST)
    return _Entry(way, sending, after)


def _run_at(made: torch.Tensor, number: int) -> None:
    """Sets the place of a tensor's node in backward."""
    node: Any = made.grad_fn
    node._set_sequence_nr(number)


def entered(x: torch.Tensor, team: Team, dim: int | None = None) -> torch.Tensor:
    """Passes x into layers that ranks share: its gradient is the sum of the ranks' gradients.

    dim: each rank has a part of the positions along it, and gets them all. Collective in backward.
    """
    if isinstance(x, Elsewhere):
        return x if dim is None else torch.cat([x] * team.size, dim)
    return _enter(x, team, dim).entered


def _is_apart(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product's two gradients are computed one after the other. Who looks at its functions sees F.linear."""
    return (
        weight.requires_grad
        and x.dim() >= 2
        and x.numel() > 0
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
    )


def product_of(
    x: torch.Tensor, team: Team, weight: torch.Tensor, bias: torch.Tensor | None, is_linear: bool, dim: int | None
) -> torch.Tensor:
    """The product of what enters with a weight of which each rank has columns.

    is_linear: the weight lies as F.linear's, else (in, out). Shapes: x (..., in) -> (..., out / ranks).
    """
    if isinstance(x, Elsewhere):
        return F.linear(entered(x, team, dim), weight if is_linear else weight.t(), bias)
    entry = _enter(x, team, dim)
    given = entry.entered
    if entry.after_send is None or not _is_apart(given, weight):
        return _keep(F.linear(given, weight if is_linear else weight.t(), bias), entry)
    product = Weight(weight, bias, is_linear)
    token: torch.Tensor = _ForWeight.apply(given.detach(), weight, bias, product, entry.parts)  # type: ignore[no-untyped-call]
    _run_at(token, entry.after_send)
    return _keep(_ForInput.apply(given, token, product), entry)  # type: ignore[no-untyped-call]
