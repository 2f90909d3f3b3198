# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that a block is called with, by their places in the call: what travels where blocks are given several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deeptide.pipeline.passing.elsewhere import Elsewhere, with_received

CARRIED = "tensors that a block is called with, by their places"  # what travels under this key


def is_carried(received: Any) -> bool:
    """Whether what the stage before handed on are tensors by their places."""
    return isinstance(received, dict) and CARRIED in received


def placed(tree: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call with the keys that lead to them, which one that is None now and then does not shift."""
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, (tuple, list, dict)):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from placed(item, f"{place}.{key}")


def take_in(arguments: Any, received: dict[str, torch.Tensor]) -> bool:
    """Gives tensors of other stages the values that came. False: they are not those of the sender, or not so shaped."""
    given = dict(placed(arguments))
    for place, value in received.items():
        tensor = given.get(place)
        if tensor is None or tensor.shape != value.shape:
            return False
        if isinstance(tensor, Elsewhere) and not tensor.is_held:
            tensor.received = value
    return True


def with_values(tree: Any, received: dict[str, torch.Tensor], place: str = "") -> Any:
    """The arguments with what came in the places of all tensors that travelled. Dictionaries and lists stay the same.

    Where this stage has such a tensor by itself, both are the same values, and what came has the gradient.
    """
    if isinstance(tree, torch.Tensor):
        return received.get(place, tree)
    if not isinstance(tree, (tuple, list, dict)):
        return tree
    named = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    items = {key: with_values(item, received, f"{place}.{key}") for key, item in named}
    if all(items[key] is item for key, item in named):
        return tree
    if isinstance(tree, tuple):
        return type(tree)(*items.values()) if hasattr(tree, "_fields") else type(tree)(items.values())
    for key, item in named:
        if items[key] is not item:
            tree[key] = items[key]
    return tree


def completed(output: Any) -> Any:
    """A model's output with what was received in it, such as an encoder's last state."""
    if isinstance(output, dict):
        for key, value in output.items():
            if isinstance(value, Elsewhere) and value.received is not None:
                output[key] = value.received
        return output
    return with_received(output)
