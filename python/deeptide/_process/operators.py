# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Has the threads of a process agree on one object for each of torch's operators, made before any of them asks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import Any

import torch
from torch._ops import OpOverloadPacket, _OpNamespace

_lock = threading.RLock()  # a namespace asks a packet
_num_made = 0  # operators; libraries that are imported later bring others


def _unlock_in_child() -> None:
    """Another thread may have held the lock as the process forked, and that thread is not in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_in_child)


def _find_once(kind: Any) -> None:
    find = kind.__getattr__

    @functools.wraps(find)
    def find_once(self: Any, name: str) -> Any:
        with _lock:
            made = vars(self).get(name)
            return find(self, name) if made is None else made

    kind.__getattr__ = find_once


@functools.cache
def _share() -> None:
    for kind in (type(torch.ops), _OpNamespace, OpOverloadPacket):
        _find_once(kind)


def _make_all(names: list[str]) -> None:
    """Makes the operators' objects: 0.1 s and 4 MB for all of torch's."""
    for full in names:
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        with contextlib.suppress(AttributeError):  # a library may register a kernel before its operator
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def share_operators() -> None:
    """Makes lookups of torch.ops wait for each other, from now on and for good, and makes what they find.

    torch makes an operator's Python object as it is first asked for and keeps it as an attribute, but its C++ side
    keeps the pointer alone (`OperatorHandle::getPythonOp`, of torch 2.9 to 2.13). Two threads that ask at once make two
    objects. The second replaces the first, and the process crashes where a dispatch mode is handed the first one. Nor
    may a second thread ask C++ while the first one's lookup runs Python code, even if both find one object: it ends in
    an assertion of PyHandleCache. Where the object is made, a lookup runs none. So only operators that are registered
    later than the last call, which each `make_world` is, can meet that.
    """
    global _num_made
    with _lock:
        _share()
        names = torch._C._dispatch_get_all_op_names()
        if len(names) != _num_made:
            _make_all(names)
            _num_made = len(names)
