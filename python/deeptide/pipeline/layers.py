# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that are built later, by the stage that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _attribute(layer: torch.nn.Module, path: str) -> object:
    """The attribute of a dotted name; None if there is none."""
    found: object = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


class LayerSpec:
    """A class and its arguments: a stage builds its own layers alone, so no rank holds the whole model."""

    def __init__(self, typename: type[torch.nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, torch.nn.Module)):
            raise RuntimeError(f"LayerSpec: got {typename!r}, expected a class derived from torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> torch.nn.Module:
        """A new layer. `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that all specs of one `key` share, on whichever stages they are.

    forward_fn(layer, inputs) runs in the layer's place, such as a head that multiplies by an embedding's weight. The
    first stage with the key owns the layer's parameters; the others borrow them for each step, and their gradients go
    back to it. `tied_weight_attr` names parameters that the layer must have, or attributes that are one of them.
    """

    def __init__(
        self,
        key: str,
        typename: type[torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def build(self, log: bool = False) -> torch.nn.Module:
        """A new layer. Errors: AttributeError if it has no parameter of a name in `tied_weight_attr`."""
        layer = super().build(log)
        names = dict(layer.named_parameters())
        for name in self.tied_weight_attr:
            if not any(_attribute(layer, name) is parameter for parameter in names.values()):
                raise AttributeError(
                    f"TiedLayerSpec '{self.key}': {self.typename.__name__} has no parameter '{name}', expected one of "
                    f"{', '.join(names) or 'none'}; give tied_weight_attr"
                )
        return layer
