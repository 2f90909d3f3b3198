# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Recomputation of activations: a model's switch for it, as models of Transformers have one, and where it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from deeptide._process import generators

# Transformers 5's name and 4's: methods NAME_enable() and NAME_disable(), and the attribute is_NAME.
_NAMES = ("activation_checkpointing", "gradient_checkpointing")


def in_backward() -> bool:
    """Whether this thread is within a backward, where a forward is one that a checkpoint runs again."""
    return bool(torch._C._current_graph_task_id() != -1)


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws alike when a checkpoint calls it again: from Python, NumPy and DeepSpeed's tracker.

    Torch's generators are torch's checkpoint's task.
    """
    tracker = sys.modules.get("deeptide.as_deepspeed.training.rng_tracker")
    return generators.repeatable(function if tracker is None else tracker.repeatable(function))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def kept_as_they_are() -> AbstractContextManager[Any]:
    """Inside, autograd keeps tensors though a checkpoint is around, as of a block that a stage cannot compute again."""
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def is_kept_as_it_is() -> bool:
    """Whether autograd keeps tensors here by `kept_as_they_are`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is _same


def _name_of(model: nn.Module) -> str | None:
    def has(name: str) -> bool:
        both = all(callable(getattr(model, f"{name}_{way}", None)) for way in ("enable", "disable"))
        return both and bool(getattr(model, "supports_gradient_checkpointing", True))

    return next((name for name in _NAMES if has(name)), None)


def recomputes(model: nn.Module) -> bool | None:
    """Whether it is on. None: the model has no such switch."""
    name = _name_of(model)
    return None if name is None else bool(getattr(model, f"is_{name}", False))


def set_recomputation(model: nn.Module, on: bool) -> None:
    """Turns the switch, as `model.gradient_checkpointing_enable()` does. Errors: ValueError where there is none."""
    name = _name_of(model)
    if name is None:
        raise ValueError(
            f"recomputation: {type(model).__name__} has no gradient_checkpointing_enable() and _disable(); "
            "expected a model with this switch, as those of Transformers have it"
        )
    turn = getattr(model, f"{name}_{'enable' if on else 'disable'}")
    kwargs = f"{name}_kwargs"
    if on and kwargs in inspect.signature(turn).parameters:
        turn(**{kwargs: {"use_reentrant": False}})
    else:
        turn()
