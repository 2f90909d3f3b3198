# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values of this stage that one of its chunks does not compute with, and buffers that each of them changes."""

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


class Repeated:
    """Buffers of a program that a stage runs once per chunk: each chunk changes them as one run per micro-batch would.

    The last chunk runs the program furthest, so the model's own buffers are its; earlier ones have copies.
    """

    def __init__(self, places: Iterable[tuple[torch.nn.Module, str]], num_chunks: int) -> None:
        self._places = list(places)
        self._copies: list[list[torch.Tensor | None]] = [[None] * len(self._places) for _ in range(num_chunks - 1)]
        self._taken = [(torch.empty(0), -1)] * len(self._places)  # what was copied last, and its version

    def begin(self) -> None:
        """Lets all chunks go on from the model's own buffers, as programs, loads and earlier steps left them."""
        for i, (module, name) in enumerate(self._places):
            own = module._buffers.get(name)
            for copies in self._copies:
                if own is None:
                    copies[i] = None
                elif not self._is_taken(i, own, copies[i]):
                    copies[i] = own.detach().clone()
            self._taken[i] = (own, own._version) if own is not None else (torch.empty(0), -1)

    def _is_taken(self, i: int, own: torch.Tensor, copy: torch.Tensor | None) -> bool:
        last, version = self._taken[i]
        return copy is not None and copy._version == 0 and last is own and version == own._version

    @contextmanager
    def __call__(self, chunk: int) -> Iterator[None]:
        """Gives the modules a chunk's buffers."""
        if chunk == len(self._copies):
            yield
            return
        copies = self._copies[chunk]
        own = [module._buffers.get(name) for module, name in self._places]
        for (module, name), copy in zip(self._places, copies, strict=True):
            module._buffers[name] = copy
        try:
            yield
        finally:
            for i, (module, name) in enumerate(self._places):
                copies[i], module._buffers[name] = module._buffers[name], own[i]


def state_of(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """A module's own parameters and buffers."""
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield f"{path}.{name}" if path else name, module, name
