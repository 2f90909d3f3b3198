# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Takes back what a forward changes beside its output, where the forward is made again."""

from __future__ import annotations

import random

import torch

from deeptide.pipeline.passing import generators


class Undo:
    """A model's buffers and the states of random generators; `restore` brings them back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [
            (module, name, value, value.detach().clone())
            for module in model.modules()
            for name, value in module._buffers.items()
            if type(value) is torch.Tensor
        ]
        self._python, self._torch = random.getstate(), generators.states()

    def restore(self) -> None:
        """Undoes what forwards since then have changed."""
        with torch.no_grad():
            for module, name, value, held in self._buffers:
                module._buffers[name] = value.copy_(held)
        random.setstate(self._python)
        generators.set_states(self._torch)
