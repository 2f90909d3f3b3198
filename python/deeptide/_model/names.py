# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Names without what wrappers put into them: a model has the same names in torch.compile or recomputation."""

from __future__ import annotations

from collections.abc import Callable

import torch

# The attribute under which torch.compile and torch's checkpoint wrappers hold the module.
_INNER = ("_orig_mod", "_checkpoint_wrapped_module")


def inner_of(module: torch.nn.Module) -> str:
    """The name of the module that a wrapper holds; empty: it is none."""
    if isinstance(module, torch.nn.DataParallel):
        return "module"
    return next((name for name in _INNER if name in module._modules), "")


def namer(model: torch.nn.Module) -> Callable[[str], str]:
    """Makes of a name that torch gives a parameter, a buffer or a module the one that it has without wrappers."""
    inner = {path: name for path, module in model.named_modules(remove_duplicate=False) if (name := inner_of(module))}
    return (lambda name: _without(name, inner)) if inner else str


def _without(name: str, inner: dict[str, str]) -> str:
    path, kept = "", []
    for part in name.split("."):
        if inner.get(path) != part:
            kept.append(part)
        path = f"{path}.{part}" if path else part
    return ".".join(kept)
