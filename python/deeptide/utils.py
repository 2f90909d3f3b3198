# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Whole values of sharded things, by parameter, under DeepSpeed's names; and its RepeatingLoader."""

import weakref

from torch.utils.weak import WeakIdKeyDictionary

from deeptide import _C
from deeptide._C import ConfigError
from deeptide.data import RepeatingLoader

__all__ = ["RepeatingLoader", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"]

# parameter -> (its engine, its name); both go when the parameter or the engine goes.
_owners = WeakIdKeyDictionary()
_ROLES = {
    "fp32": "master",
    **{role: role for info in _C.optimizers() for role in info.state_roles()},
    "momentum_buffer": "momentum",  # torch's name for it
}


def register(engine):
    """Makes the functions below know the engine's parameters."""
    reference = weakref.ref(engine)
    for name, parameter in engine.module.named_parameters():
        _owners[parameter] = (reference, name)


def _full_state(param, role):
    reference, name = _owners.get(param, (lambda: None, None))
    engine = reference()
    if engine is None:
        raise ConfigError(f"this tensor of shape {tuple(param.shape)} is no parameter of a living engine")
    return engine._core.full_state(name, role)


def safe_get_full_fp32_param(param):
    """The whole fp32 value of a parameter; None when it is not optimized. Collective."""
    return _full_state(param, "master")


def safe_get_full_grad(param):
    """The whole accumulated gradient of a parameter; None when there is none. Collective."""
    return _full_state(param, "gradient")


def safe_get_full_optimizer_state(param, optim_state_key):
    """A whole optimizer state, such as "exp_avg" or "momentum_buffer"; None when there is none. Collective."""
    if optim_state_key not in _ROLES:
        raise ConfigError(f"optimizer state: got {optim_state_key!r}, expected one of {', '.join(_ROLES)}")
    return _full_state(param, _ROLES[optim_state_key])
