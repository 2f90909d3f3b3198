# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Whole values of sharded things, by parameter, under DeepSpeed's names; and its RepeatingLoader."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from deeptide import _C
from deeptide._C import ConfigError
from deeptide.data import RepeatingLoader

if TYPE_CHECKING:
    from deeptide.engine import Engine

__all__ = ["RepeatingLoader", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"]

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
    for name, parameter in engine.module.named_parameters():
        _owners[parameter] = (reference, name)


def _full_state(param: Tensor, role: str) -> Tensor | None:
    reference, name = _owners.get(param, (lambda: None, None))
    engine: Engine | None = reference()
    if engine is None:
        raise ConfigError(f"this tensor of shape {tuple(param.shape)} is no parameter of a living engine")
    return engine._core.full_state(name, role)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole fp32 value of a parameter; None when it is not optimized. Collective."""
    return _full_state(param, "master")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole accumulated gradient of a parameter; None when there is none. Collective."""
    return _full_state(param, "gradient")


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A whole optimizer state, such as "exp_avg" or "momentum_buffer"; None when there is none. Collective."""
    if optim_state_key not in _ROLES:
        raise ConfigError(f"optimizer state: got {optim_state_key!r}, expected one of {', '.join(_ROLES)}")
    return _full_state(param, _ROLES[optim_state_key])
