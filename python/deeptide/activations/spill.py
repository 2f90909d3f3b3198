# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what blocks save for backward in the host's memory, or in files."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deeptide.activations.measure import storages_of, unchanged, with_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeptide import _C

_LEAST_BYTES = 4096  # smaller tensors stay: a copy takes as long as one of many
BLOCK_BYTES = 4 << 20  # of what passes through memory on its way to files


class _Away:
    """A tensor's values elsewhere, once for all operators that save it."""

    def __init__(self, tensor: torch.Tensor, spill: _C.Spill) -> None:
        self._spill = spill
        self._storage = StorageWeakRef(tensor.untyped_storage())  # keeps its address its own, without its memory
        self._id = spill.put(tensor)
        self._again: weakref.ref[torch.Tensor] | None = None

    def back(self) -> torch.Tensor:
        """The tensor on its device again."""
        tensor = None if self._again is None else self._again()
        if tensor is None:
            tensor = self._spill.get(self._id)
            self._again = weakref.ref(tensor)
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            self._spill.drop(self._id)


class Store:
    """One engine's tensors that lie elsewhere: in files of `folders`; without any, in the host's memory."""

    def __init__(self, core: _C.Engine, folders: Sequence[str], num_blocks: int) -> None:
        """Errors: RuntimeError naming a folder that cannot be used."""
        self._spill = core.spill(folders, num_blocks)
        self._is_host = not folders
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Away] = weakref.WeakValueDictionary()

    def peak_bytes(self) -> int:
        """Bytes of all tensors at the fullest moment."""
        return self._spill.peak_bytes()

    def keep(self, tensor: torch.Tensor) -> _Away | None:
        """Puts it away. None: it had better stay, since it is small, or no memory of its own."""
        count = tensor.numel() * tensor.element_size()
        if count < _LEAST_BYTES or tensor.layout != torch.strided or (self._is_host and tensor.device.type == "cpu"):
            return None
        storage = tensor.untyped_storage()
        if count > storage.nbytes():  # an expanded one
            return None
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version,
               tensor.is_conj(), tensor.is_neg())  # fmt: skip
        away = self._known.get(key)
        if away is None:
            away = self._known[key] = _Away(tensor.detach(), self._spill)
        return away


class SpilledBlock:
    """The hooks of one block. Parameters and buffers stay where they are."""

    def __init__(self, module: torch.nn.Module, store: Store) -> None:
        self._module, self._store = module, store

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Around the block's forward."""
        stays = storages_of(self._module)

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in stays:
                return with_version(tensor)
            return self._store.keep(tensor) or with_version(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, _back)


def _back(kept: Any) -> Any:
    return kept.back() if isinstance(kept, _Away) else unchanged(kept)


class Rates(NamedTuple):
    """The cost of files. Units: seconds per byte, on the slowest rank.

    copying: through memory, there and back. writing, reading: of the drive, beside which a rank computes.
    """

    copying: float
    writing: float
    reading: float

    def seconds(self, count: int, forward: float) -> float:
        """Seconds that a block adds to a step if it keeps so many bytes, and its forward takes so long.

        Files are written while the next block's forward runs, and read during the backward of the one after it, which
        takes about twice as long as its forward.
        """
        waiting = max(count * self.writing - forward, 0.0) + max(count * self.reading - 2 * forward, 0.0)
        return count * self.copying + waiting


def measure(store: Store, num_blocks: int, device: torch.device) -> Rates:
    """Writes and reads a few times what passes through memory at once."""
    piece = torch.zeros(BLOCK_BYTES // 4, device=device)
    times = [_there_and_back(store, piece, count) for count in (num_blocks // 2, 4 * num_blocks)]
    (few_there, few_back), (there, back) = times
    return Rates(few_there + few_back, max(there - few_there, 0.0), max(back - few_back, 0.0))


def _there_and_back(store: Store, piece: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds per byte to put so many away, and to have them again."""
    begin = time.perf_counter()
    ids = [store._spill.put(piece) for _ in range(count)]
    middle = time.perf_counter()
    for each in reversed(ids):
        store._spill.get(each)
        store._spill.drop(each)
    size = count * BLOCK_BYTES
    return (middle - begin) / size, (time.perf_counter() - middle) / size
