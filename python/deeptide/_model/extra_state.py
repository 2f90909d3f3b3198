# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Saves modules' state beside parameters and buffers: torch's get_extra_state and set_extra_state, by torch's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deeptide._C import CheckpointError
from deeptide._model.names import namer


def _modules_with(model: torch.nn.Module, method: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """(torch's key, module) of each module whose class overrides `method`, for every name of a shared one."""
    plain = getattr(torch.nn.Module, method)
    name_of = namer(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(type(module), method, plain) is not plain:
            yield name_of(f"{path}._extra_state" if path else "_extra_state"), module


def read_extra_states(model: torch.nn.Module) -> dict[str, Any]:
    """{key: state}. A module with several names is asked once."""
    states: dict[str, Any] = {}
    by_module: dict[int, Any] = {}
    for key, module in _modules_with(model, "get_extra_state"):
        if id(module) not in by_module:
            by_module[id(module)] = module.get_extra_state()
        states[key] = by_module[id(module)]
    return states


def write_extra_states(model: torch.nn.Module, states: dict[str, Any], strict: bool) -> list[str]:
    """Gives each module its state; returns what did not fit: keys that only one side has, each with the reason.

    Errors: CheckpointError when strict, and then no module was given anything.
    """
    takers = dict(_modules_with(model, "set_extra_state"))
    differences = [f"'{key}' is not in the checkpoint" for key in takers if key not in states]
    differences += [f"the model has no module that takes '{key}'" for key in states if key not in takers]
    if differences and strict:
        raise CheckpointError(
            "the checkpoint's extra states (get_extra_state) do not fit the model: "
            f"{'; '.join(differences)}. Parameters and buffers were loaded; load_module_strict=False accepts the rest"
        )
    for key, module in takers.items():
        if key in states:
            module.set_extra_state(states[key])
    return differences
