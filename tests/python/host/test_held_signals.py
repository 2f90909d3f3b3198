# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A signal that comes while steps hold handlers back, between any two lines, runs its handler once."""

import os
import signal
import sys

import pytest

from deeptide._process import interrupts


class Moments:
    """Traces the module's lines and calls, and sends a signal at the one of a number."""

    def __init__(self, number):
        self.number, self.passed = number, 0

    def __call__(self, frame, _event, _argument):
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        if self.passed == self.number:
            os.kill(os.getpid(), signal.SIGINT)
        self.passed += 1
        return self


def hold_once(number, inside=lambda: None):
    """Holds handlers back around a function, with a signal at a moment. Returns (runs of its handler, moments)."""
    came = []

    def handler(*_of_signal):
        came.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    moments = Moments(number)
    sys.settrace(moments)
    try:
        with interrupts.held_signals():
            inside()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert signal.getsignal(signal.SIGINT) is handler
    return len(came), moments.passed


@pytest.fixture(autouse=True)
def _handlers():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_signal_between_any_two_lines_runs_its_handler_once():
    _, count = hold_once(-1)
    assert count > 30
    assert [hold_once(number)[0] for number in range(count)] == [1] * count


def test_a_signal_that_waits_is_not_lost_to_one_that_comes_at_the_end():
    sent, handled = [], []
    signal.signal(signal.SIGTERM, lambda *_of_signal: handled.append(True))

    def terminate():
        sent.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    _, count = hold_once(-1, terminate)
    for number in range(count):
        assert hold_once(number, terminate)[0] == 1
        assert len(handled) == len(sent)
    assert len(sent) > count / 2
