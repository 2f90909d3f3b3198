# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Takes back what a forward changes beside its output, where the forward is made again."""

from __future__ import annotations

import torch

from deeptide._process import generators
from deeptide.pipeline.passing.elsewhere import version_of


class Buffers:
    """A model's buffers; `restore` brings them back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = [
            (module, name, value, value.detach().clone())
            for module in model.modules()
            for name, value in module._buffers.items()
            if type(value) is torch.Tensor
        ]

    def restore(self) -> None:
        """Undoes what forwards since then have changed."""
        with torch.no_grad():
            for module, name, value, held in self._held:
                module._buffers[name] = value.copy_(held)


# Elements of a buffer whose writes torch counts; those of a batch norm, whose buffers are smaller, it does not.
_LARGE = 1 << 14


class Start:
    """Buffers and generators where a step's forwards began. A large buffer that has not changed is not copied again."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.nn.Module, str], tuple[torch.Tensor, int | None, torch.Tensor]] = {}
        self._drawn = generators.states()

    def note(self, model: torch.nn.Module) -> None:
        """A step begins."""
        held, self._held = self._held, {}
        for module in model.modules():
            for name, value in module._buffers.items():
                if type(value) is not torch.Tensor:
                    continue
                last = held.get((module, name))
                version = version_of(value) if value.numel() > _LARGE else None
                if last is None or last[0] is not value or version is None or last[1] != version:
                    last = value, version, value.detach().clone()
                self._held[module, name] = last
        self._drawn = generators.states()

    def restore(self) -> None:
        """Undoes what forwards since then have changed and drawn."""
        with torch.no_grad():
            for (module, name), (value, version, copy) in self._held.items():
                changed = version is None or version_of(value) != version
                module._buffers[name] = value.copy_(copy) if changed else value
        generators.set_states(self._drawn)


class Undo(Buffers):
    """The states of random generators besides."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._drawn = generators.states()

    def restore(self) -> None:
        """Undoes what forwards since then have changed and drawn."""
        super().restore()
        generators.set_states(self._drawn)
