# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of other stages: a shape and a type without bytes, which mark whatever is computed from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

_new = torch.ops.aten

# Operators whose results have the argument's shape and not its values: every stage has those. With their functions.
FROM_SHAPES = {
    _new.ones_like.default: torch.ones,
    _new.zeros_like.default: torch.zeros,
    _new.new_ones.default: torch.ones,
    _new.new_zeros.default: torch.zeros,
}
# Operators that make tensors for others to write into, such as states of convolutions that a cache keeps.
_MAKERS = {
    *FROM_SHAPES,
    _new.empty.memory_format,
    _new.empty_like.default,
    _new.full.default,
    _new.full_like.default,
    _new.new_empty.default,
    _new.new_full.default,
    _new.ones.default,
    _new.zeros.default,
}
_GROUPED = _new._grouped_mm.default  # of experts: rows (N, in), (experts, in, out) -> (N, out)


# The stage that computes a tensor has its gradient, and runs the hooks that its own run of the program registers.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_RETAIN = torch.Tensor.retain_grad


class ElsewhereError(RuntimeError):
    """A program needs, on this stage, a value that another stage has. `tensors`: where known, in the place of it."""

    tensors: tuple[Elsewhere, ...] = ()


class Elsewhere(torch.Tensor):
    """A tensor of another stage. What operators make of it is of that stage too; who asks for its bytes gets an error.

    origin: the parameter or block that it comes from, for errors.
    received: its values, where the stage before has sent them: of one micro-batch.
    label: the module's output that it is, if it is one; parents: else what it was computed from.
    """

    origin: str
    received: torch.Tensor | None = None
    label: str | None = None
    parents: tuple[Elsewhere, ...] = ()
    is_held = False  # by a module, as its parameter or buffer

    def __new__(cls: type[Elsewhere], like: torch.Tensor, origin: str, device: torch.device | None = None) -> Elsewhere:
        """Has the shape and type of `like`, which may lie on the meta device."""
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
        )
        made.origin = origin
        return made

    def again(self) -> Elsewhere:
        """Another one like it."""
        return Elsewhere(self, self.origin)

    def rewrite(self, given: list[Elsewhere]) -> None:
        """An operator has written into it: it is no longer the output that it was."""
        if self.is_held:
            return
        before = self.again()
        before.label, before.parents = self.label, self.parents
        self.label, self.parents = None, (before, *(tensor for tensor in given if tensor is not self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Without history: what is computed from it has no values, so no gradients; but for what was received."""
        plain = getattr(func, "__wrapped__", func)  # `derivatives` watches them
        if plain in _HOOKS:
            return RemovableHandle(OrderedDict())
        if plain is _RETAIN:
            return None
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise ElsewhereError(
                f"torch.autograd.{func.__name__} differentiates what comes from "
                f"'{next(elsewhere_in((args, kwargs or {}))).origin}', and another stage has its graph: differentiate "
                "inside one block, or train the model without a pipeline"
            )
        args, kwargs = with_received((args, kwargs or {}))
        if next(elsewhere_in((args, kwargs)), None) is None:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*args, **kwargs)

    def tolist(self) -> Any:
        """Errors: ElsewhereError. Torch's own names this class."""
        error = ElsewhereError(f"tolist needs the values of what comes from '{self.origin}', which another stage has")
        error.tensors = (self,)
        raise error

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override, unused-ignore]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype}, of {self.origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Elsewhere)]
        try:
            return cls._result(func, args, kwargs, given)
        except ElsewhereError as error:
            error.tensors = tuple(given)
            raise

    @staticmethod
    def _result(func: Any, args: Any, kwargs: dict[str, Any], given: list[Elsewhere]) -> Any:
        first = given[0]
        targets = written(func, args, kwargs)
        for tensor in targets:
            if not isinstance(tensor, Elsewhere):
                raise ElsewhereError(
                    f"{func} writes what comes from '{first.origin}', which another stage has, into a tensor that "
                    "every stage has"
                )
            tensor.rewrite(given)
        if torch.Tag.inplace_view in func.tags:
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
                return func(*args, **kwargs)
        if targets and len(targets) == len(func._schema.returns):
            return targets[0] if len(targets) == 1 else tuple(targets)
        shapes = _infer(func, args, kwargs, first.origin)
        if func in FROM_SHAPES:
            return FROM_SHAPES[func](shapes.shape, dtype=shapes.dtype, device=first.device)
        device = next((tensor.device for tensor in given), first.device)
        return tree_map_only(torch.Tensor, lambda out: _computed(out, given, device), shapes)


def _computed(like: torch.Tensor, given: list[Elsewhere], device: torch.device) -> Elsewhere:
    made = Elsewhere(like, given[0].origin, device)
    made.parents = tuple(given)
    return made


class MadeElsewhere(TorchDispatchMode):
    """While a block of another stage is computed on shapes: tensors that it makes to write into are of that stage."""

    has_looked = False  # an operator gave what depends on values of the tensors that are here

    def __init__(self, origin: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._origin = origin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.has_looked |= _looks(func, args)
        if func not in _MAKERS or isinstance(made, Elsewhere) or not made.is_floating_point():
            return made  # every stage has what is computed from numbers of places
        return Elsewhere(made, self._origin)


def _looks(func: Any, args: Any) -> bool:
    if func is _new.index.Tensor:  # by a mask; places alone do not matter
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def version_of(tensor: torch.Tensor) -> int | None:
    """Another number after each write; None where torch counts none."""
    return None if tensor.is_inference() else tensor._version


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place])
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _infer(func: Any, args: Any, kwargs: dict[str, Any], origin: str) -> Any:
    """An operator's results on the meta device. Errors: ElsewhereError where they depend on values."""
    args, kwargs = tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    try:
        if func is _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:  # torch's inference takes bf16 alone
            return args[0].new_empty(args[0].shape[0], args[1].shape[2])
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise ElsewhereError(
            f"{func} needs the values of what comes from '{origin}', which another stage has"
        ) from error


def with_received(value: Any) -> Any:
    """The same with what was received in the place of tensors of other stages, in tuples, lists and dictionaries.

    Lists and dictionaries stay the same ones: a block may write into what a program looks at later.
    """
    if isinstance(value, Elsewhere):
        return value if value.received is None else value.received
    if type(value) is tuple:
        items = tuple(map(with_received, value))
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if type(value) in (list, dict):
        for key, item in list(value.items() if type(value) is dict else enumerate(value)):
            made = with_received(item)
            if made is not item:
                value[key] = made
    return value


def elsewhere_in(value: Any, depth: int = 4) -> Iterator[Elsewhere]:
    """The tensors of other stages in what a function takes or returns, in any containers."""
    if isinstance(value, Elsewhere):
        yield value
    elif depth and isinstance(value, (tuple, list, set)):
        for item in value:
            yield from elsewhere_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from elsewhere_in(item, depth - 1)
