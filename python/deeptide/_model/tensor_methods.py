# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Makes methods of tensors that bypass operators work on tensors with our dispatch key.

torch takes the device of a new tensor from the highest dispatch key of the old one, and fails where that is ours
("DeferredInit doesn't correspond to a device"): torch.nn.init.trunc_normal_ does so. And tolist, which print uses,
reads memory that no operator has been asked for. A sharded parameter's tolist stays an error: the other ranks would
have to take part. data_ptr tells memories apart in many programs, before there are any: tensors that zero.Init defers
answer with an address at which no memory lies. Where a step has published a parameter that has not arrived yet, every
way to its memory waits, as operators do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deeptide import _C

_installed = False


def install() -> None:
    """Wraps these methods, once; other tensors take torch's own way."""
    global _installed
    if _installed:
        return
    _installed = True
    for name in ("new", "new_tensor"):
        setattr(torch.Tensor, name, _wrapped(getattr(torch.Tensor, name), _C.has_deferred_key, _nothing_of_type))
    torch.Tensor.tolist = _wrapped(torch.Tensor.tolist, _C.is_deferred, _C.values_of)  # type: ignore[method-assign]
    for name in ("data_ptr", "numpy", "tolist", "untyped_storage", "__dlpack__"):
        setattr(torch.Tensor, name, _waiting(getattr(torch.Tensor, name), _C.wait_for_values))
    torch.UntypedStorage.data_ptr = _waiting(  # type: ignore[method-assign]
        torch.UntypedStorage.data_ptr, _C.wait_for_storage
    )
    torch.Tensor.data_ptr = _told_apart(torch.Tensor.data_ptr, _C.address_of)  # type: ignore[method-assign]
    torch.UntypedStorage.data_ptr = _told_apart(  # type: ignore[method-assign]
        torch.UntypedStorage.data_ptr, _C.address_of_storage
    )


def _nothing_of_type(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _wrapped(
    method: Any, concerns: Callable[[torch.Tensor], bool], plain: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if isinstance(self, torch.Tensor) and concerns(self):
            self = plain(self)
        return method(self, *args, **options)

    return call


def _waiting(method: Any, wait_for: Callable[[Any], None]) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if isinstance(self, (torch.Tensor, torch.UntypedStorage)):
            wait_for(self)
        return method(self, *args, **options)

    return call


def _told_apart(method: Any, address_of: Callable[[Any], int]) -> Any:
    @functools.wraps(method)
    def data_ptr(self: Any) -> int:
        return address_of(self) or method(self)

    return data_ptr
