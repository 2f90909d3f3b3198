# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Takes back what a forward changes beside its output, where the forward is made again."""

from __future__ import annotations

import torch

from deeptide._process import generators


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


class Undo(Buffers):
    """The states of random generators besides."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._drawn = generators.states()

    def restore(self) -> None:
        """Undoes what forwards since then have changed and drawn."""
        super().restore()
        generators.set_states(self._drawn)
