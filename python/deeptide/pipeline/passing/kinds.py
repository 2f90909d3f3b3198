# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of forwards: the key of all that one forward shows and later ones trust.

A kind is the same on all stages: whether the program gets the outputs, the loss function's code, modes, and the
arguments' names, types and plain values. Numbers are no part of it, since most only travel: the step, or how many
labels a batch has. Where a forward needs other values than its kind's first one, the kind opens again.

A signature is a stage's own: the kind, which part runs, and the plain attributes of modules and of what they hold,
such as a configuration. A flag that changes there is seen before a block is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_MOST_KINDS = 32  # with texts in them; each new one passes the stages alone
_MOST_VALUES = 8  # of an attribute; one that has had more is a count of something
_MOST_STATES = 256
_PLAIN = (bool, int, float, str, type(None))
_BASE = frozenset(torch.nn.Module().__dict__) - {"training"}


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any], with_texts: bool = True) -> tuple[Hashable, ...]:
    """The kinds of a forward's arguments, as far as they may change a model's program."""
    return (*(_kind(each, with_texts) for each in args), *((n, _kind(v, with_texts)) for n, v in kwargs.items()))


def _kind(value: Any, with_texts: bool) -> Hashable:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and with_texts):
        return value
    if isinstance(value, dict):
        return type(value).__name__, *((str(key), _kind(item, with_texts)) for key, item in value.items())
    return type(value).__name__


class Kinds:
    """Makes kinds and signatures of one model's forwards. `say`: tells the user, once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._state = PlainState(model)
        self._seen: set[Any] = set()
        self.say: Callable[[str], None] = lambda text: None

    def of(self, inputs: Any, gives_outputs: bool, loss_fn: Any) -> Hashable:
        """The kind of a forward with such arguments, equal on all stages. inputs: (args, kwargs)."""
        program = getattr(loss_fn, "__code__", type(loss_fn))
        modes = gives_outputs, program, self._model.training, torch.is_grad_enabled()
        args, kwargs = inputs
        kind = (*modes, *kind_of(args, kwargs))
        if kind not in self._seen and len(self._seen) >= _MOST_KINDS:
            kind = (*modes, *kind_of(args, kwargs, with_texts=False))
        if kind not in self._seen:
            self._seen.add(kind)
            if len(self._seen) == _MOST_KINDS:
                self.say(
                    f"the model was called in {_MOST_KINDS} ways, by names, types, truth values and texts of its "
                    "arguments, and the first forward of each passed the pipeline's stages alone; a new "
                    "text is no new way from now on"
                )
        return kind

    def signature(self, part: int, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The kind of a forward, whose earlier ones a part of this stage may trust. args: as of the model."""
        return part, kind, self._state.number(), kind_of(args, kwargs, with_texts=False)


class PlainState:
    """Truth values, numbers and texts that modules and what they hold have as attributes, and the modules' modes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._owners: list[tuple[dict[str, Any], int, list[str]]] = []  # attributes, how many, the names of plain ones
        self._last: list[Any] = []
        self._values: dict[tuple[int, str], set[Any]] = {}  # of attributes that have changed
        self._links: list[tuple[dict[str, Any], str, Any]] = []  # attributes that have such attributes themselves
        self._counts: set[tuple[int, str]] = set()  # attributes that are left out
        self._numbers: dict[Any, int] = {}  # by state
        self._given = 0  # numbers so far
        self._scan()

    def _scan(self) -> None:
        self._owners, self._links = [], []
        seen: set[int] = set()
        rest = [vars(each) for each in self._modules if not type(each).__module__.startswith("torch.nn.")]
        for depth in range(3):
            inner: list[dict[str, Any]] = []
            for held in rest:
                if id(held) in seen:
                    continue
                seen.add(id(held))
                own = [(name, value) for name, value in held.items() if name not in _BASE]
                names = [name for name, value in own if type(value) in _PLAIN and (id(held), name) not in self._counts]
                self._owners.append((held, len(held), names))
                for name, value in own if depth < 2 else ():
                    found = _attributes(value)
                    if found is not None:
                        self._links.append((held, name, value))
                        inner.append(found)
            rest = inner
        self._last = self._now()

    def _now(self) -> list[Any]:
        return [[_plain(held.get(name)) for name in names] for held, _, names in self._owners]

    def number(self) -> int:
        """Another one for each state. An attribute that has had many values is left out from then on."""
        has_others = any(len(held) != count for held, count, _ in self._owners)
        if has_others or any(held.get(name) is not value for held, name, value in self._links):
            self._scan()
        now = self._now()
        if now != self._last:
            self._note(now)
            self._last = now = self._now()
        modes = bytes(each.training for each in self._modules)
        key = modes, *((type(value), value) for row in now for value in row)
        if key not in self._numbers:
            if len(self._numbers) == _MOST_STATES:
                self._numbers.clear()
            self._numbers[key] = self._given = self._given + 1
        return self._numbers[key]

    def _note(self, now: list[Any]) -> None:
        for place, (before, after) in enumerate(zip(self._last, now, strict=True)):
            if before == after:
                continue
            names = self._owners[place][2]
            for name, old, new in list(zip(names, before, after, strict=True)):
                if old != new:
                    where = id(self._owners[place][0]), name
                    values = self._values.setdefault(where, {old})
                    values.add(new)
                    if len(values) > _MOST_VALUES:
                        self._counts.add(where)
                        names.remove(name)


def _plain(value: Any) -> Any:
    return value if type(value) in _PLAIN else ...


def _attributes(value: Any) -> dict[str, Any] | None:
    if type(value) is dict:
        return value if all(isinstance(key, str) for key in value) else None
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
        return None
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None
