# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer object that a program gave to `initialize` and goes on using: it answers as the engine's does."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeptide.optimizer import DeeptideOptimizer

# Methods of torch's optimizers that the one of the engine answers. A step of the program's own optimizer is not among
# them: the engine takes it.
_ANSWERED = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")


class AwayState(defaultdict[Any, Any]):
    """In the place of an optimizer's `state` while the engine has it: empty, and an error where it is asked for one."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            "the optimizer's state lies in the engine, sharded over the ranks: read it by "
            "deeptide.utils.safe_get_full_optimizer_state(parameter, name), write it by safe_set_full_optimizer_state. "
            "A method of the optimizer that needs its state outside of step() cannot run"
        )

    __getitem__ = __setitem__ = __missing__ = __contains__ = get = setdefault = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> AwayState:
        return AwayState()


def follow(given: torch.optim.Optimizer, ours: DeeptideOptimizer, steps: bool) -> None:
    """From now on `given` answers as `ours`, whose groups it has. steps: the engine steps by it and keeps its state."""
    for name in _ANSWERED:
        setattr(given, name, types.MethodType(_forwarding(name, ours), given))
    if not steps:
        given.state = AwayState()


def _forwarding(name: str, ours: DeeptideOptimizer) -> Callable[..., Any]:
    def forward(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if ours.has_ended():
            return getattr(type(self), name)(self, *args, **kwargs)
        return getattr(ours, name)(*args, **kwargs)

    forward.__name__ = name
    if name == "step":
        forward._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else torch's schedules warn of it
    return forward


def run_hooks(when: str, optimizers: list[torch.optim.Optimizer]) -> None:
    """Runs what was registered to run before ("pre") or after ("post") a step of any of these."""
    for hook in (_global_optimizer_pre_hooks if when == "pre" else _global_optimizer_post_hooks).values():
        hook(optimizers[0], (), {})
    for optimizer in optimizers:
        for hook in (vars(optimizer).get(f"_optimizer_step_{when}_hooks") or {}).values():
            hook(optimizer, (), {})


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Steps by the optimizer's class, without what torch runs around it: hooks of every optimizer among it."""
    step = type(optimizer).step
    # functools.wraps is common; only torch's own wrapper is left out.
    is_torchs = getattr(step, "__code__", None) in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    (step.__wrapped__ if is_torchs else step)(optimizer)  # type: ignore[attr-defined]


class WithoutHooks:
    """Inside, a step of the optimizer runs no hooks: they are the whole step's, and run around it."""

    _NAMES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = {name: vars(optimizer)[name] for name in self._NAMES if vars(optimizer).get(name)}

    def __enter__(self) -> None:
        for name in self._kept:
            setattr(self._optimizer, name, OrderedDict())

    def __exit__(self, *_: object) -> None:
        for name, hooks in self._kept.items():
            setattr(self._optimizer, name, hooks)
