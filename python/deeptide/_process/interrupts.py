# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lets a step end before a signal's handler runs: one that raises in its middle would leave half of an update."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deeptide import _C

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST = 20.0  # seconds that a handler waits for an update's end: the others may not come any more
BEFORE_UPDATES = 3.0  # likewise, in a step whose ranks have not met: nothing has changed
_TOGETHER = 1.0  # within them a signal counts once: a terminal and a launcher may both send it
_COMES_WITHIN = 5.0  # a signal that another rank has got already

_Handler = Callable[[int, FrameType | None], Any]


class _Held:
    """Stands in the place of the program's handlers, in the main thread."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.handlers: dict[int, _Handler] = {}
        self.came: dict[int, float] = {}  # by signal: when it first did
        self._timer: threading.Timer | None = None
        self._is_timers = False  # the signal that comes

    def note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        waited = now - self.came.setdefault(number, now)
        if waited <= _TOGETHER:
            self._arm(number, self.longest)
        elif waited < _LONGEST and self._is_timers and _C.is_in_update():
            self._timer = None
            self._arm(number, _LONGEST - waited)
        else:  # time is over, or somebody insists
            del self.came[number]
            self.handlers[number](number, frame)

    def _arm(self, number: int, seconds: float) -> None:
        if self._timer is not None:
            return
        self._is_timers = False
        main = threading.main_thread().ident
        assert main is not None

        def remind() -> None:
            self._is_timers = True
            signal.pthread_kill(main, number)

        self._timer = threading.Timer(seconds, remind)
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system refuses a thread, or the interpreter ends
            self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_held: _Held | None = None  # of the main thread


@contextlib.contextmanager
def held_signals(longest: float = _LONGEST) -> Iterator[None]:
    """Inside, Python's handlers of signals wait until the end: so many seconds at most, longer within an update."""
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(longest)
    for number in map(int, _SIGNALS):
        handler = signal.getsignal(number)
        if callable(handler):  # not C's, which raises nothing
            held.handlers[number] = handler
    try:
        for number in held.handlers:
            signal.signal(number, held.note)
        _held = held
        yield
    finally:
        _held = None
        _give_back(held)


def _give_back(held: _Held) -> None:
    """Runs the handlers that have waited once all have their places again."""
    with contextlib.ExitStack() as last:  # each of them, whatever the ones before raise
        for number in sorted(held.came, reverse=True):
            last.callback(held.handlers[number], number, None)
        for number, handler in held.handlers.items():
            if signal.getsignal(number) == held.note:  # else the program has set another one inside
                last.callback(signal.signal, number, handler)
        last.callback(held.end)


def wait_for_signal() -> bool:
    """Whether a signal waits, or comes soon: other ranks have got one."""
    end = time.monotonic() + _COMES_WITHIN
    while _held is not None and not _held.came and time.monotonic() < end:
        time.sleep(0.02)
    return _held is not None and bool(_held.came)
