# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Notes what a stage computes from parameters: the next stage does not have it, and needs it if its blocks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deeptide.pipeline.passing.elsewhere import FROM_SHAPES, Elsewhere, version_of, written
from deeptide.pipeline.passing.letters import tensors_in


class Derived(TorchDispatchMode):
    """From its making to `end`, but for calls of blocks, all of whose results count.

    Its rule is that of Elsewhere tensors, so what it notes is what the next stage has no bytes of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._held: dict[int, Any] = {}  # by address, which is nobody else's as long as it is held
        self._is_open = False
        self._resume()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in FROM_SHAPES and any(map(self.has, tree_leaves((args, kwargs)))):
            self.note((out, written(func, args, kwargs or {})))
        return out

    def has(self, value: Any) -> bool:
        """Whether a tensor is a parameter, or was computed from one."""
        if isinstance(value, (torch.nn.Parameter, Elsewhere)):
            return True
        return isinstance(value, torch.Tensor) and id(_memory(value)) in self._held

    def note(self, tree: Any) -> None:
        """These depend on parameters."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Elsewhere):
                memory = _memory(leaf)
                self._held[id(memory)] = memory

    def call(self, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's output: of parameters, but for what it returns as it was given."""
        self.end()
        before = {id(tensor): version_of(tensor) for tensor in tensors_in((args, kwargs)) if not self.has(tensor)}
        output = block(*args, **kwargs)
        self._resume()
        self.note([tensor for tensor in _tensors(output) if before.get(id(tensor), -1) != version_of(tensor)])
        return output

    def _resume(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        self._is_open = True

    def end(self) -> None:
        """Looks at operators no longer."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> Any:
    """The storage, which views share; the tensor itself where it has none to show, as within transforms."""
    is_plain = tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.untyped_storage() if is_plain else tensor
