# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Notices that modules got parameters or modules: an engine looks at its model when it may have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from deeptide.engine import Engine

_count = 0
_watches = False


def _notice(*_: object) -> None:
    global _count
    _count += 1


def watch() -> int:
    """From now on, `count` follows whatever is registered in any module of the process. Returns it."""
    global _watches
    if not _watches:
        _watches = True
        torch_module.register_module_parameter_registration_hook(_notice)
        torch_module.register_module_module_registration_hook(_notice)
    return _count


def count() -> int:
    """Registrations so far, by assignment too."""
    return _count


def tell(engine: Engine) -> None:
    """Has the core look at the model at this step if anything was registered since it last looked."""
    if _count != engine._registrations:
        engine._registrations = _count
        engine._core.expect_model_changes()
