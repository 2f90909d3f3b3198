# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Modules that a forward puts in the place of others, as BigBird does for short inputs."""

from __future__ import annotations

import torch

_PLAIN = (str, int, float, bool, type(None))


class Structure:
    """A model's modules and the plain values that they hold; `restore` brings them back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = [
            (path, module, dict(module._modules), _plain_values(module)) for path, module in model.named_modules()
        ]

    def restore(self) -> str:
        """Undoes what forwards since then have replaced. Returns the path of a replaced module, or an empty text."""
        replaced = ""
        for path, module, children, _ in self._held:
            names = [name for name, child in children.items() if module._modules.get(name) is not child]
            names += [name for name in module._modules if name not in children]
            if not names:
                continue
            replaced = replaced or (f"{path}.{names[0]}" if path else names[0])
            module._modules.clear()
            module._modules.update(children)
        if replaced:  # the values that go with them
            for _, module, _, values in self._held:
                module.__dict__.update(values)
        return replaced


def _plain_values(module: torch.nn.Module) -> dict[str, object]:
    return {key: value for key, value in module.__dict__.items() if isinstance(value, _PLAIN) and key != "training"}
