# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a block, as far as its output on shapes may depend on it; and such outputs, kept by that."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections import OrderedDict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from deeptide.pipeline.errors import NotCopied
from deeptide.pipeline.passing.elsewhere import Elsewhere, version_of

_MOST = 128  # calls of a block, by key
_SAME = 3  # numbers with one output: it does not depend on them
_NUMBERS = (int, float, complex)
_PLAIN = (type(None), bool, str, bytes)
_FIXED = (enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_IDENTITY = (torch.nn.Module, type, types.BuiltinFunctionType, torch.Generator)
_DEPTH = 12  # of containers and objects inside each other


def _is_cache(value: object) -> bool:
    """Whether it is one of Transformers', into which each layer writes its own part."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _parts_of(value: Any) -> tuple[Any, Any] | None:
    """(what names its parts, the parts) of a container, an object or a function; None: of something unknown."""
    if isinstance(value, (tuple, list)):
        return len(value), value
    if isinstance(value, dict):
        return tuple(value), list(value.values())
    if isinstance(value, (set, frozenset)):
        return (frozenset(value), ()) if all(isinstance(item, (*_PLAIN, *_NUMBERS)) for item in value) else None
    if isinstance(value, (range, slice)):
        return repr(value), ()
    if isinstance(value, types.MethodType):
        return value.__func__, (value.__self__,)
    if isinstance(value, functools.partial):
        return value.func, (value.args, value.keywords)
    if isinstance(value, types.FunctionType):
        try:
            return value.__code__, [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # a cell that is empty yet
            return None
    held = getattr(value, "__dict__", None)
    return None if held is None else (tuple(held), list(held.values()))


class Given:
    """The parts of a call's arguments, however deep, in order.

    key: with the `numbers` all that results on shapes can depend on; None where a part's contents cannot be seen.
    """

    def __init__(self, *arguments: Any) -> None:
        self.nodes: list[Any] = []
        self._numbers: list[Any] = []
        self._places: dict[int, int] = {}
        self._states: list[Any] = []  # what the block may change
        self._is_known = True
        found = tuple(self._walk(each, _DEPTH) for each in arguments)
        self.key = found if self._is_known else None
        self.numbers = tuple(self._numbers)

    def _walk(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, _NUMBERS):
            self._numbers.append(value)
            return type(value)
        if isinstance(value, (*_FIXED, *_BY_IDENTITY)):
            return value
        before = self._places.get(id(value))
        if before is not None:
            return "again", before
        self._places[id(value)] = len(self.nodes)
        self.nodes.append(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if _is_cache(value):
            return type(value)
        parts = _parts_of(value) if depth else None
        if parts is None:
            self._is_known = False
            return None
        self._states.append((parts[0], *(each if isinstance(each, _NUMBERS) else id(each) for each in parts[1])))
        return type(value), parts[0], *(self._walk(each, depth - 1) for each in parts[1])

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_nested or tensor.layout is not torch.strided:
            self._is_known = False
            return None
        is_elsewhere = isinstance(tensor, Elsewhere)
        if isinstance(tensor, Elsewhere):
            self._states.append((id(tensor), tensor.shape, tensor.label, *map(id, tensor.parents)))
        else:
            self._states.append((id(tensor), tensor.shape, version_of(tensor)))
        return is_elsewhere, tensor.dtype, tensor.device, tensor.shape, tensor.stride()

    def place(self, value: Any) -> int | None:
        """Its place among the parts that are more than plain values."""
        found = self._places.get(id(value))
        return found if found is not None and self.nodes[found] is value else None

    def is_unchanged(self, *arguments: Any) -> bool:
        """Whether the same arguments have the same parts still, and no tensor of them was written."""
        return Given(*arguments)._states == self._states


_LOOKS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class Looks(TorchFunctionMode):
    """Notes whether a program takes values out of tensors past torch's operators."""

    has_looked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.has_looked |= func in _LOOKS
        return func(*args, **(kwargs or {}))


class _Part:
    """In the place of what a block was given and has returned: one of its nodes, or of its numbers."""

    def __init__(self, place: int, is_number: bool) -> None:
        self.place, self.is_number = place, is_number


def _form(stored: Any) -> Any:
    """Equal for outputs that are given again alike."""
    leaves, structure = tree_flatten(stored)
    forms = [
        (leaf.place, leaf.is_number)
        if isinstance(leaf, _Part)
        else (leaf.dtype, leaf.device, leaf.shape, leaf.stride())
        if isinstance(leaf, Elsewhere)
        else (type(leaf), leaf)
        for leaf in leaves
    ]
    return structure, forms


class _Outputs:
    """Outputs for arguments that differ in their numbers alone."""

    def __init__(self) -> None:
        self.by_numbers: OrderedDict[Any, Any] = OrderedDict()
        self.is_one = False  # whatever the numbers are

    def keep(self, numbers: Any, stored: Any) -> None:
        self.by_numbers[numbers] = stored
        if len(self.by_numbers) == _SAME:
            first, *others = map(_form, self.by_numbers.values())
            self.is_one = all(other == first for other in others)
        while len(self.by_numbers) > (1 if self.is_one else _MOST):
            self.by_numbers.popitem(last=False)

    def get(self, numbers: Any) -> tuple[Any, ...]:
        """The output, if it is known."""
        if self.is_one:
            return tuple(self.by_numbers.values())
        return (self.by_numbers[numbers],) if numbers in self.by_numbers else ()


class Outputs:
    """A block's outputs on shapes, each by the kind of forward and what the block was given.

    A number that is another one in each call, and made no difference in the first few, is left out of the key.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Any, _Outputs] = OrderedDict()
        self.has_dropped = False  # one, since there were too many

    def get(self, kind: Any, given: Given) -> tuple[Any, ...]:
        """(the output of this call,), if it is known."""
        found = None if given.key is None else self._held.get((kind, given.key))
        if found is None:
            return ()
        self._held.move_to_end((kind, given.key))
        made: dict[int, Any] = {}

        def anew(stored: Any) -> Any:
            if isinstance(stored, _Part):
                return (given.numbers if stored.is_number else given.nodes)[stored.place]
            if isinstance(stored, Elsewhere):  # values are of one micro-batch
                return made.setdefault(id(stored), stored.again())
            return stored

        return tuple(tree_map(anew, stored) for stored in found.get(given.numbers))

    def keep(self, kind: Any, given: Given, output: Any) -> None:
        """Keeps an output, unless it holds what was computed from values."""
        if given.key is None:
            return
        is_whole, made = True, dict[int, Elsewhere]()

        def stored(value: Any) -> Any:
            nonlocal is_whole
            place = given.place(value)
            if place is not None:
                return _Part(place, is_number=False)
            if isinstance(value, Elsewhere):
                return made.setdefault(id(value), value.again())
            if isinstance(value, _NUMBERS) and not isinstance(value, bool) and value in given.numbers:
                return _Part(given.numbers.index(value), is_number=True)
            is_whole &= isinstance(value, (*_PLAIN, *_NUMBERS, *_FIXED))
            return value

        kept = tree_map(stored, output, is_leaf=lambda value: given.place(value) is not None)
        if not is_whole:
            return
        self._held.setdefault((kind, given.key), _Outputs()).keep(given.numbers, kept)
        if len(self._held) > _MOST:
            self._held.popitem(last=False)
            self.has_dropped = True


class Block(NotCopied):
    """One call of a module, which has others where it is called `again`."""

    def __init__(self, number: int, module: torch.nn.Module) -> None:
        self.number = number
        names = list(inspect.signature(module.forward).parameters)
        self._first = names[0] if names else ""
        self._hooks = [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.outputs = Outputs()  # of forwards that were passed over
        self.again: list[Block] = []

    def is_observed(self) -> bool:
        """Whether somebody looks at what happens inside it."""
        return any(self._hooks)

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, Any]]:
        """(what a block is handed, what it is called with besides)."""
        if args:
            return args[0], (args[1:], kwargs)
        return kwargs.get(self._first), ((), {key: value for key, value in kwargs.items() if key != self._first})

    def put_in(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments with another value handed, if any is."""
        if not args and self._first not in kwargs:
            return args, kwargs
        return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, self._first: value})
