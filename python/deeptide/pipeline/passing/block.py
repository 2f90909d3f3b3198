# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One block of a cut model, as the forwards of a stage know it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from deeptide.pipeline.errors import NotCopied
from deeptide.pipeline.passing.given import Outputs


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
