# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The begin and end of a checkpoint's forward and backward: waits for the device there, and logs how long each took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deeptide.accelerator import get_accelerator
from deeptide.timers import FORWARD_GLOBAL_TIMER, SynchronizedWallClockTimer

_BACKWARD = "backward"


class _Interval:
    """From `begin` to `end`, once at a time."""

    def __init__(self, name: str, synchronizes: bool, profiles: bool) -> None:
        self._name, self._synchronizes, self._profiles = name, synchronizes, profiles
        self._timers: SynchronizedWallClockTimer | None = None

    def begin(self, *_: Any) -> None:
        if self._timers is not None:
            return
        if self._synchronizes:
            get_accelerator().synchronize()
        self._timers = SynchronizedWallClockTimer()
        if self._profiles:
            self._timers(self._name).start()

    def end(self, *_: Any) -> None:
        timers, self._timers = self._timers, None
        if timers is None:
            return
        if self._profiles:
            timers(self._name).stop()
            timers.log([self._name])
        if self._synchronizes:
            get_accelerator().synchronize()


@contextmanager
def forward(synchronizes: bool, profiles: bool) -> Iterator[None]:
    """Around a checkpoint's forward: logs "time (ms) | fwd: …"."""
    interval = _Interval(FORWARD_GLOBAL_TIMER, synchronizes, profiles)
    interval.begin()
    yield
    interval.end()


def watch_backward(outputs: Any, args: tuple[Any, ...], is_reentrant: bool, synchronizes: bool, profiles: bool) -> None:
    """Has backward log "time (ms) | backward: …".

    Of a checkpoint that is not reentrant it ends when the arguments have their gradients, or with the whole backward
    if none needs one.
    """
    interval = _Interval(_BACKWARD, synchronizes, profiles)
    begin: Callable[..., None] = interval.begin
    nodes = {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn}
    if is_reentrant:
        for node in nodes:
            node.register_hook(interval.end)
    else:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if given:
            torch.autograd.graph.register_multi_grad_hook(given, interval.end)
        else:

            def begin(*_: Any) -> None:
                interval.begin()
                torch.autograd.Variable._execution_engine.queue_callback(interval.end)

    for node in nodes:
        node.register_prehook(begin)
