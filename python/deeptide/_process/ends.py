# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ends what would outlive the interpreter: engines, and what threads of process groups still hold.

A thread of torch's Gloo groups drops the last collective a moment after its waiter went on. Where the interpreter ends
within that moment, the thread asks for the lock of an interpreter that is gone, and the process aborts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from deeptide import _C

if TYPE_CHECKING:
    from types import FrameType

    from deeptide.engine import Engine

_GLOO = "pt_gloo_runloop"  # the name of those threads
_LOOK_EVERY = 0.002  # seconds in which a thread that waits for the interpreter's lock gets it
_LONGEST = 2.0  # seconds; a thread that waits for a peer shows as idle long before
_LONGEST_FOR_OTHERS = 5.0  # seconds; they look four times per second while they wait
_PACKAGES = tuple(str(Path(str(sys.modules[name].__file__)).parent) for name in ("torch", "deeptide"))
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_process = os.getpid()


def end_with_interpreter(engine: Engine) -> None:
    """Closes the engine before the interpreter ends, unless the program does so earlier."""
    _engines.add(engine)


def _gloo_threads() -> dict[str, str]:
    """{thread: its state and how often it has waited} of all groups of this process."""
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == _GLOO:
                lines = (task / "status").read_text().splitlines()
                threads[task.name] = " ".join(line for line in lines if line.startswith(("State", "voluntary")))
    return threads


def _drain() -> None:
    """Returns when no Gloo thread is about to drop anything: each slept through a moment with the lock free."""
    end = time.monotonic() + _LONGEST
    before = None
    while time.monotonic() < end:
        threads = _gloo_threads()
        if threads == before and all("S (sleeping)" in state for state in threads.values()):
            return
        before = threads
        time.sleep(_LOOK_EVERY)


def _is_in_use() -> bool:
    """Whether another thread, which the interpreter does not wait for, is within torch or an engine."""
    own = threading.get_ident()
    frame: FrameType | None
    for thread, frame in sys._current_frames().items():
        while thread != own and frame is not None:
            if frame.f_code.co_filename.startswith(_PACKAGES):
                return True
            frame = frame.f_back
    return False


def _is_read_by_others(engine: Engine) -> bool:
    """Whether this process serves the store in which others read why it ends."""
    world = engine.world
    is_cause = engine._has_told and not engine._has_lost_peers
    return is_cause and world.rank == 0 and world.size > 1 and world.source != "threads"


def _end() -> None:
    if os.getpid() != _process:
        return  # a forked child owns none of it
    if not _is_in_use():
        for engine in list(_engines):
            with contextlib.suppress(Exception):  # peers and their store may have ended
                if _is_read_by_others(engine):
                    engine._core.let_others_end(_LONGEST_FOR_OTHERS)
                engine.destroy_core()
    _drain()
    _C._let_threads_sleep()


atexit.register(_end)


def _forget_in_child() -> None:
    global _process
    _process = -1
    # The destructor of a group waits for threads that a child does not have, so the child keeps the groups.
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(distributed._world.pg_map) if distributed else []:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_forget_in_child)
