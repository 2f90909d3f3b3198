# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""State by parameter, whole or this rank's part, read and written under DeepSpeed's names; and its RepeatingLoader.

Every function here but `RepeatingLoader` is collective: all ranks call it, for the same parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._model import publishing
from deeptide._model.names import namer
from deeptide.data import RepeatingLoader

if TYPE_CHECKING:
    from deeptide.engine import Engine

__all__ = [
    "RepeatingLoader",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

# parameter -> (its engine, its name); both go when the parameter or the engine goes.
_owners = WeakIdKeyDictionary()
_ROLES = {
    "fp32": "master",
    **{role: role for info in _C.optimizers() for role in info.state_roles()},
    "momentum_buffer": "momentum",  # torch's name for it
}


def register(engine: Engine) -> None:
    """Makes the functions below know the engine's parameters."""
    reference = weakref.ref(engine)
    plain = namer(engine.module)
    for name, parameter in engine.module.named_parameters():
        _owners[parameter] = (reference, plain(name))
    publishing.follow(engine)


def engines() -> list[Engine]:
    """The living engines of this process."""
    found = {id(engine): engine for reference, _ in _owners.values() if (engine := reference()) is not None}
    return [engine for engine in found.values() if not engine.is_destroyed]


def engine_of(param: Tensor) -> Engine | None:
    """The living engine that has this parameter."""
    engine: Engine | None = _owners.get(param, (lambda: None, None))[0]()
    return engine


def owner(param: Tensor) -> tuple[Engine, str]:
    """The living engine that has this parameter, and its name there. Errors: ConfigError without one."""
    reference, name = _owners.get(param, (lambda: None, None))
    engine: Engine | None = reference()
    if engine is None:
        raise ConfigError(f"this tensor of shape {tuple(param.shape)} is no parameter of a living engine")
    return engine, name


def _place(param: Tensor) -> tuple[_C.Engine, str]:
    engine, name = owner(param)
    return engine._core, name


def _role(param: Tensor, optim_state_key: str) -> str:
    optimizer = owner(param)[0].optimizer
    if optimizer is not None and _C.find_optimizer(optimizer.info.name) is None:
        return optim_state_key  # the caller's own optimizer: the names are its
    if optimizer is not None and optim_state_key in optimizer.info.state_roles():
        return optim_state_key
    if optim_state_key not in _ROLES:
        raise ConfigError(f"optimizer state: got {optim_state_key!r}, expected one of {', '.join(_ROLES)}")
    return _ROLES[optim_state_key]


def _get_full(param: Tensor, role: str) -> Tensor | None:
    core, name = _place(param)
    return core.full_state(name, role)


def _set_full(param: Tensor, role: str, value: Tensor) -> None:
    core, name = _place(param)
    core.set_full_state(name, role, value)


def _get_local(param: Tensor, role: str) -> Tensor | None:
    core, name = _place(param)
    state = core.local_state(name, role)
    return None if state is None else state[1]


def _set_local(param: Tensor, role: str, value: Tensor) -> None:
    core, name = _place(param)
    core.set_local_state(name, role, value)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole fp32 value of a parameter; None when it is not optimized."""
    return _get_full(param, "master")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient of a parameter, summed over ranks and micro-batches so far; None when there is none."""
    return _get_full(param, "gradient")


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A whole optimizer state, such as "exp_avg" or "momentum_buffer"; None when there is none."""
    return _get_full(param, _role(param, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets the whole fp32 value; the parameter follows at once. Shapes: value as the parameter, equal on all ranks.

    Errors: ValueError when the parameter is not optimized, or shapes or ranks' values differ.
    """
    _set_full(param, "master", value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Sets the whole gradient that the next step uses, before clipping. Shapes and errors: as above."""
    _set_full(param, "gradient", value)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets a whole optimizer state, such as "exp_avg". Shapes and errors: as above."""
    _set_full(param, _role(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replaces each parameter's gradient by `update_func(gradient, parameter)`, where it has one."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 values that this rank holds, flat: its slice, or all at stage 0; None when it is not optimized."""
    return _get_local(param, "master")


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """The elements of the gradient that this rank holds, flat; None when there is none."""
    return _get_local(param, "gradient")


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The elements of an optimizer state that this rank holds, flat; None when there is none."""
    return _get_local(param, _role(param, optim_state_key))


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets the fp32 values that this rank holds; the parameter follows on all ranks.

    Errors: ValueError when the parameter is not optimized or `value` has another number of elements.
    """
    _set_local(param, "master", value)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Sets the elements of the gradient that this rank holds. Errors: as above."""
    _set_local(param, "gradient", value)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets the elements of an optimizer state that this rank holds. Errors: as above."""
    _set_local(param, _role(param, optim_state_key), value)
