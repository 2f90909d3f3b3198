# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The flat fp32 masters that programs read of DeepSpeed's optimizers: copies, and a write into one is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from deeptide import utils
from deeptide.as_deepspeed import NotSupportedError

_WRITES = {"__setitem__", "__set__", "__delitem__", "resize_as_", "set_"}


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


class MasterCopy(torch.Tensor):
    """A part that a rank holds, as it was when it was read. Whatever is computed from it is a plain tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        written = [(kwargs or {}).get("out")]
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
            written.append(args[0] if args else None)
        if any(isinstance(each, cls) for each in written) and name not in ("__index__", "__int__", "__invert__"):
            raise NotSupportedError(
                f"{name or func} writes into a copy of the optimizer's masters, which would change nothing: write them "
                "by deepspeed.utils.safe_set_full_fp32_param or safe_set_local_fp32_param"
            )
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call, unused-ignore]
        held = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, cls)}
        return tree_map(lambda each: each if _is_view(each, held) else _plain(each), made)


def _is_view(value: Any, held: set[int]) -> bool:
    return isinstance(value, MasterCopy) and _storage(value) in held


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, MasterCopy) else value


def of_group(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of each parameter's master, flat; of one that it holds nothing of, an empty tensor."""
    pieces = [utils.safe_get_local_fp32_param(parameter) for parameter in parameters]
    return [torch.empty(0) if piece is None else piece.detach().float().flatten() for piece in pieces]


def flat(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """They in one tensor."""
    return torch.cat([torch.empty(0), *of_group(parameters)]).as_subclass(MasterCopy)
