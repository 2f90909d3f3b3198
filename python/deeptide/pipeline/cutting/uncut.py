# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model as it was before the cut: which tensors its modules had, and a copy that has them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from deeptide._engine.snapshot import copy_of
from deeptide.pipeline.errors import copied_whole
from deeptide.pipeline.passing.elsewhere import Elsewhere

Named = tuple[str, torch.Tensor]
Exchange = Callable[[Iterable[Named]], Iterator[Named]]  # gives the other stages these, and returns theirs

_MARKS = ("_deeptide_cut", "_deeptide_block")  # attributes of the model and of its blocks, once they are cut


class _State(NamedTuple):
    """A module's names, in order."""

    parameters: list[str]
    buffers: list[str]
    not_saved: set[str]  # of the buffers


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Uncut:
    """Made before the cut. Keeps names alone, no tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._states: dict[str, _State] = {}
        self._firsts: dict[str, str] = {}  # by name of a parameter: its first name, if it has several
        seen: dict[int, str] = {}
        for path, module in model.named_modules():
            hidden = set(module._non_persistent_buffers_set)
            self._states[path] = _State(list(module._parameters), list(module._buffers), hidden)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._firsts[_joined(path, name)] = seen.setdefault(id(parameter), _joined(path, name))

    def copy(
        self, model: torch.nn.Module, kinds: Iterable[tuple[torch.nn.Module, type]], exchange: Exchange
    ) -> torch.nn.Module:
        """A copy of a stage's model, as `copy_of` makes it, that has all other stages' tensors as well. Collective.

        kinds: of the modules whose class the cut has changed.
        """
        left_out: list[Any] = []
        for module in model.modules():
            of_cut = [name for name in _MARKS if name in vars(module)]
            stand_ins = [name for name, value in vars(module).items() if isinstance(value, Elsewhere)]
            left_out += [vars(module)[name] for name in (*of_cut, *stand_ins)]
        with copied_whole():
            twin = copy_of(model, left_out)
        twins = dict(zip(map(id, model.modules()), list(twin.modules()), strict=True))
        for module, kind in kinds:
            twins[id(module)].__class__ = kind
        tensors = dict(self._of_stage(twin))
        for name, value in exchange(list(tensors.items())):
            if name not in tensors:
                is_parameter = name in self._firsts
                tensors[name] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
        for path, module in twin.named_modules():
            self._put_back(module, path, tensors)
        return twin.eval()

    def _of_stage(self, twin: torch.nn.Module) -> Iterator[Named]:
        """This stage's parameters, each once, and its buffers."""
        for path, module in twin.named_modules():
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None and not isinstance(value, Elsewhere):
                    yield self._firsts.get(_joined(path, name), _joined(path, name)), value

    def _put_back(self, module: torch.nn.Module, path: str, tensors: dict[str, torch.Tensor]) -> None:
        state = self._states[path]
        for name in (*_MARKS, *state.parameters, *state.buffers):
            module.__dict__.pop(name, None)
        for names, held in ((state.parameters, module._parameters), (state.buffers, module._buffers)):
            found: dict[str, Any] = {}
            for name in names:
                full = _joined(path, name)
                found[name] = tensors.get(self._firsts.get(full, full))
            held.clear()
            held.update(found)
        module._non_persistent_buffers_set.update(state.not_saved)
