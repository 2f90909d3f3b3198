# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Notices that modules got parameters or modules: an engine looks at its model when it may have changed."""

from __future__ import annotations

from torch.nn.modules import module as torch_module

_count = 0
_watches = False


def _notice(*_: object) -> None:
    global _count
    _count += 1


def watch() -> None:
    """From now on, `count` follows whatever is registered in any module of the process."""
    global _watches
    if _watches:
        return
    _watches = True
    torch_module.register_module_parameter_registration_hook(_notice)
    torch_module.register_module_module_registration_hook(_notice)


def count() -> int:
    """Registrations so far, by assignment too."""
    return _count
