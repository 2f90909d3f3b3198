# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values of this stage that one of its chunks does not compute with: hidden behind tensors without bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from deeptide.pipeline.passing.elsewhere import Elsewhere


class Hidden:
    """(origin, module, name) of parameters and buffers; a call hides them for as long as its context lasts.

    A module's attribute shadows its parameter of the same name, which stays where named_parameters() finds it.
    """

    def __init__(self, places: Iterable[tuple[str, torch.nn.Module, str]]) -> None:
        self._places = list(places)
        self._stand_ins: list[Elsewhere] = []  # made once the engine has set types

    def _make(self) -> list[Elsewhere]:
        made = [Elsewhere(getattr(module, name), origin) for origin, module, name in self._places]
        for stand_in in made:
            stand_in.is_held = True
        return made

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hides them; what another stage has lent comes back, too."""
        if len(self._stand_ins) < len(self._places):
            self._stand_ins = self._make()
        before = [module.__dict__.get(name) for _, module, name in self._places]  # what another stage has lent
        buffers = [module._buffers.get(name) for _, module, name in self._places]
        for (_, module, name), stand_in in zip(self._places, self._stand_ins, strict=True):
            module.__dict__[name] = stand_in
        try:
            yield
        finally:
            for (_, module, name), lent, buffer in zip(self._places, before, buffers, strict=True):
                if lent is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = lent
                if buffer is not None:  # `self.count += 1` has put the stand-in there
                    module._buffers[name] = buffer


def state_of(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """A module's own parameters and buffers."""
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield f"{path}.{name}" if path else name, module, name
