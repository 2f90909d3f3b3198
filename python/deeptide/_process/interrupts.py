# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lets a step end before a signal's handler runs: one that raises in its middle would leave half of an update."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, which takes 20 times as long
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deeptide import _C

_SIGNALS = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2))
)
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

    def begin(self) -> None:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            before = getattr(handler, "__self__", None)
            if isinstance(before, _Held):  # another signal has ended it too early
                handler = before.handlers[number]
            if callable(handler):  # not C's, which raises nothing
                self.handlers[number] = handler
                _signal.signal(number, self.note)

    def end(self) -> None:
        """Runs the handlers that have waited. Another signal may come between any two lines: it calls `note`."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._run_handlers()
        finally:
            self._give_back()

    def note(self, number: int, frame: FrameType | None) -> None:
        now, is_timers = time.monotonic(), self._is_timers
        self._is_timers = False
        if _held is not self:  # it has ended
            if not is_timers:
                self.came.setdefault(number, now)
            self.end()
            return
        waited = now - self.came.setdefault(number, now)
        if waited <= _TOGETHER:
            self._arm(number, self.longest)
        elif waited < _LONGEST and is_timers and _C.is_in_update():
            self._timer = None
            self._arm(number, _LONGEST - waited)
        else:  # time is over, or somebody insists
            del self.came[number]
            self.handlers[number](number, frame)

    def _give_back(self) -> None:
        for number, handler in self.handlers.items():
            if _signal.getsignal(number) == self.note:  # else the program has set another one inside
                _signal.signal(number, handler)

    def _run_handlers(self) -> None:
        """Each of them, whatever the ones before raise."""
        if self.came:
            try:
                self.handlers[number := self.came.popitem()[0]](number, None)  # no line lies between
            finally:
                self._run_handlers()

    def _arm(self, number: int, seconds: float) -> None:
        if self._timer is not None:
            return
        main = threading.main_thread().ident
        assert main is not None

        def remind() -> None:
            if _held is self:
                self._is_timers = True
                signal.pthread_kill(main, number)

        self._timer = threading.Timer(seconds, remind)
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system refuses a thread, or the interpreter ends
            self._timer.start()


_held: _Held | None = None  # of the main thread


@contextlib.contextmanager
def held_signals(longest: float = _LONGEST) -> Iterator[None]:
    """Inside, Python's handlers of signals wait until the end: so many seconds at most, longer within an update."""
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held(longest)
    try:
        _held = held
        held.begin()
        yield
    finally:
        _held = None
        held.end()


def wait_for_signal() -> bool:
    """Whether a signal waits, or comes soon: other ranks have got one."""
    end = time.monotonic() + _COMES_WITHIN
    while _held is not None and not _held.came and time.monotonic() < end:
        time.sleep(0.02)
    return _held is not None and bool(_held.came)
