# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what a forward keeps for backward, block by block, and how long each block takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from deeptide.activations.choice import Measured


def storages_of(module: torch.nn.Module) -> set[int]:
    """The identities of the storages of a module's parameters and buffers, while these live."""
    return {
        tensor.untyped_storage()._cdata
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.layout == torch.strided
    }


@contextlib.contextmanager
def watched(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, shows `see` each tensor that autograd keeps; the hooks around, if any, decide what becomes of it."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = around if around is not None else (with_version, unchanged)

    def show(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(show, unpack):
        yield


class Kept(NamedTuple):
    """A tensor that autograd keeps, and how often it had been written then: torch asks that only where no hooks are."""

    tensor: torch.Tensor
    version: int


def with_version(tensor: torch.Tensor) -> Kept:
    """A hook that keeps the tensor as it is.

    An operator that keeps its own output would hold itself by it, for ever where no backward comes: what operators made
    is kept without its history, which autograd adds again.
    """
    return Kept(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def unchanged(kept: Kept) -> torch.Tensor:
    """The tensor that was kept. Errors: RuntimeError in torch's words if it was written since."""
    tensor, version = kept
    if tensor._version == version:
        return tensor
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )


class Meter:
    """Counts one micro-batch at a time; what it tells is the most of those so far."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._device = device
        self._most = dict.fromkeys(names, (0, 0))  # bytes, bytes of inputs
        self._times: dict[str, list[int]] = {name: [] for name in self._most}
        self._on_device: list[tuple[str, torch.Event, torch.Event]] = []  # what `await_times` adds to these
        self.outside = 0
        self.has_measured = False
        self._begin(set())

    def _begin(self, parameters: set[int]) -> None:
        self._parameters = parameters
        # A weak reference keeps a storage's address its own, without its memory.
        self._seen: dict[int, StorageWeakRef] = {}
        self._bytes = dict.fromkeys(self._most, 0)
        self._inputs = dict.fromkeys(self._most, 0)
        self._beside = 0

    @contextlib.contextmanager
    def forward(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a forward of the model."""
        self._begin(storages_of(model))
        with watched(lambda tensor: self._count(tensor, None)):
            yield

    @property
    def beside(self) -> int:
        """Bytes kept beside the blocks so far, in the forward that runs."""
        return self._beside

    def of_block(self, name: str) -> tuple[int, int]:
        """(bytes kept, of its inputs) of a block so far, in the forward that runs."""
        return self._bytes[name], self._inputs[name]

    def storages(self) -> set[int]:
        """The identities of storages that were counted so far, in the forward that runs."""
        return set(self._seen)

    def end_forward(self) -> None:
        """Takes a forward's figures."""
        for name, (own, inputs) in self._most.items():
            self._most[name] = max(own, self._bytes[name]), max(inputs, self._inputs[name])
        self.outside = max(self.outside, self._beside)
        self.has_measured = True
        self._begin(set())

    def _new_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the tensor's storage, where nobody has counted them and they are no parameter's."""
        if tensor.layout != torch.strided:
            return tensor._nnz() * tensor.element_size() if tensor.layout == torch.sparse_coo else 0
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen or storage._cdata in self._parameters:
            return 0
        self._seen[storage._cdata] = StorageWeakRef(storage)
        return storage.nbytes()

    def _count(self, tensor: torch.Tensor, name: str | None) -> None:
        count = self._new_bytes(tensor)
        if name is None:
            self._beside += count
        else:
            self._bytes[name] += count

    def block(self, name: str, arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Around a block's forward."""
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                self._inputs[name] += self._new_bytes(tensor)
        return watched(lambda tensor: self._count(tensor, name))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Around a block's forward or its recomputation.

        The host never waits for a device here: that may wait for ranks which wait for this one to go on.
        """
        if self._device.type == "cpu":
            begin = time.perf_counter_ns()
            try:
                yield
            finally:
                self._times[name].append(time.perf_counter_ns() - begin)
            return
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        first.record()
        try:
            yield
        finally:
            last.record()
            self._on_device.append((name, first, last))

    def await_times(self) -> None:
        """Waits for what a device still does, for `results`. Between steps."""
        for name, first, last in self._on_device:
            last.synchronize()
            self._times[name].append(round(1e6 * first.elapsed_time(last)))
        self._on_device.clear()

    def results(self) -> list[Measured]:
        """By block; one that was not called has zeros."""
        return [Measured(*self._most[name], min(times, default=0)) for name, times in self._times.items()]
