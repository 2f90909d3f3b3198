# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what a block of an accelerator's model saves for backward in the host's memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from deeptide.activations.measure import storages_of, unchanged, with_version

_LEAST_BYTES = 4096  # smaller tensors stay: a copy takes as long as one of many


class Tally:
    """Bytes in the host's memory, now and at most."""

    current = most = 0

    def add(self, count: int) -> None:
        """Negative: freed."""
        self.current += count
        self.most = max(self.most, self.current)


class _OnHost:
    """A tensor's values on the host."""

    def __init__(self, tensor: torch.Tensor, tally: Tally) -> None:
        pinned = tensor.device.type == "cuda"  # copies of page-locked memory do not wait for the device
        self.values = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self.values.copy_(tensor, non_blocking=pinned)
        self.device, self._tally, self._is_pinned = tensor.device, tally, pinned
        self._bytes = tensor.numel() * tensor.element_size()
        tally.add(self._bytes)

    def back(self) -> torch.Tensor:
        """On the device again."""
        return self.values.to(self.device, non_blocking=self._is_pinned)

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):
            self._tally.add(-self._bytes)


class OnHost:
    """The hooks of one block. Parameters and buffers stay where they are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.tally = Tally()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Around the block's forward."""
        stays = storages_of(self._module)

        def pack(tensor: torch.Tensor) -> Any:
            is_small = tensor.numel() * tensor.element_size() < _LEAST_BYTES
            if is_small or tensor.device.type == "cpu" or tensor.layout != torch.strided:
                return with_version(tensor)
            if tensor.untyped_storage()._cdata in stays:
                return with_version(tensor)
            return _OnHost(tensor.detach(), self.tally)

        return torch.autograd.graph.saved_tensors_hooks(pack, _back)


def _back(kept: Any) -> Any:
    return kept.back() if isinstance(kept, _OnHost) else unchanged(kept)
