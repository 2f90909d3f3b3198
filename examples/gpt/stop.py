# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stopping early, on ^C or when the time is up, at the same step on every rank. stop.cc is its twin."""

from __future__ import annotations

import signal
import time

INTERRUPTED, TIME_IS_UP = "interrupted", "time is up"


class StopRequest:
    """A context: inside it, ^C and SIGTERM are a wish, and `agreed` says when all ranks fulfil it.

    A rank that wants to stop says so in the store before a step, and all look there after it: since the step itself
    waits for every rank, all see the same.
    """

    def __init__(self, store, minutes: float | None) -> None:
        self.store = store
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.reason: str | None = None

    def __enter__(self) -> StopRequest:
        self.handlers = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _ask(self, *_) -> None:
        self.reason = INTERRUPTED

    def before_step(self, step: int) -> None:
        if self.reason is None and self.deadline and time.monotonic() > self.deadline:
            self.reason = TIME_IS_UP
        if self.reason is not None:
            self.store.set(f"gpt/stop/{step}", self.reason)

    def agreed(self, step: int) -> bool:
        """Returns whether any rank has asked for a stop at this step; for after the step."""
        if not self.store.check([f"gpt/stop/{step}"]):
            return False
        self.reason = self.store.get(f"gpt/stop/{step}").decode()
        return True
