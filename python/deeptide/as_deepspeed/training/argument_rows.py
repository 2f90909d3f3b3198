# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Buffers for the arguments that checkpoints keep, made once, so that their memory is not cut into pieces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from deeptide._process.log import say


class _Row:
    """A row of a buffer, which is taken for as long as somebody holds this."""

    def __init__(self, index: int, free: list[int]) -> None:
        self._index, self._free = index, free

    def __del__(self) -> None:
        self._free.append(self._index)


class _Kept(NamedTuple):
    """A tensor that lies in a buffer."""

    values: torch.Tensor  # flat
    shape: torch.Size
    device: torch.device
    row: _Row | None


class ArgumentRows:
    """One buffer for each place among a checkpoint's arguments, and each size and type: a row for each checkpoint."""

    def __init__(self, number: int) -> None:
        """number: of checkpoints whose arguments are kept at once."""
        self.number = number
        self._position = 0
        self._has_warned = False
        self.buffers: dict[Any, tuple[torch.Tensor, list[int]]] = {}  # with the rows that are free

    def begin(self) -> None:
        """A checkpoint begins: what it keeps first is its first argument."""
        self._position = 0

    def keep(self, values: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, _Row | None]:
        """A copy, in a row that is taken until the second value is gone. Shapes: values (N,), the copy too."""
        key = self._position, values.numel(), values.dtype, device
        self._position += 1
        if key not in self.buffers:
            buffer = torch.empty(self.number, values.numel(), dtype=values.dtype, device=device)
            self.buffers[key] = buffer, list(reversed(range(self.number)))
        buffer, free = self.buffers[key]
        if not free:
            self._warn()
            return values.detach().to(device, copy=True), None
        index = free.pop()
        row = buffer.data[index]  # each view counts its own writes: a row says nothing of the others
        row.copy_(values.detach())
        return row, _Row(index, free)

    def _warn(self) -> None:
        if not self._has_warned:
            say(
                f"contiguous_checkpointing: more than num_checkpoints, {self.number}, keep their arguments at once; "
                "the others lie in memory of their own. Give the number of checkpointed calls of a forward, times the "
                "micro-batches that are alive at once",
                "warning",
            )
        self._has_warned = True

    def hooks(self, on_cpu: bool) -> AbstractContextManager[Any]:
        """Within, floating tensors that autograd saves lie in rows. on_cpu: all lie in CPU memory."""

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Kept:
            is_kept = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 0
            device = torch.device("cpu") if on_cpu else tensor.device
            if is_kept:
                values, row = self.keep(tensor.reshape(-1), device)
                return _Kept(values, tensor.shape, tensor.device, row)
            if tensor.device == device:
                return tensor
            return _Kept(tensor.to(device).reshape(-1), tensor.shape, tensor.device, None)

        def unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
            return kept if isinstance(kept, torch.Tensor) else kept.values.to(kept.device).view(kept.shape)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
