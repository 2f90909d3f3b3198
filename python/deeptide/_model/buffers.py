# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The buffers that a checkpoint holds, found anew at each step without a walk over all modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from deeptide import _C
from deeptide._model import changes
from deeptide._model.describe import describer

_count = 0  # of modules' first buffers


def _notice(module: torch.nn.Module, _name: str, _buffer: torch.Tensor | None) -> None:
    global _count
    if not module._buffers:
        _count += 1


# Once and for good, as in `changes`.
torch_module.register_module_buffer_registration_hook(_notice)


def looks_at(model: torch.nn.Module) -> tuple[Callable[[], _C.ModelDescription], Buffers]:
    """Functions by which an engine sees the model as it is: all of it, and its buffers alone."""
    return describer(model), Buffers(model)


class Buffers:
    """Calls return (name, buffer), by every name, as the modules hold them now. The model is held weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = weakref.proxy(model)
        self._seen: tuple[int, int] | None = None
        self._places: list[tuple[str, torch.nn.Module]] = []

    def __call__(self) -> list[tuple[str, torch.Tensor]]:
        now = changes.count(), _count
        if now != self._seen:
            modules = self._model.named_modules(remove_duplicate=False)
            self._places = [(path + "." if path else "", module) for path, module in modules if module._buffers]
            self._seen = now
        return [
            (path + name, buffer)
            for path, module in self._places
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
