# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Waits for what a step has published ("overlap_publish") where neither an operator nor a tensor's method does."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import TYPE_CHECKING

from deeptide import _C

if TYPE_CHECKING:
    from deeptide.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def follow(engine: Engine) -> None:
    """From now on, forks wait for what this engine's steps publish, if they return before all of it has arrived."""
    if not any(_C.has_deferred_key(p) and not _C.is_sharded(p) for p in engine.module.parameters()):
        return
    _watch_forks()
    _engines.add(engine)


def _wait_for(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        _C.wait_for_values(parameter)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(before=_before_fork)


def _before_fork() -> None:
    """The parent receives; a child would find parameters of two steps."""
    for engine in list(_engines):
        with contextlib.suppress(Exception):  # the next use of a parameter meets it
            _wait_for(engine)
