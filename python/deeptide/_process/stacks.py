# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Python stacks on request of the launcher, also from a process whose main thread is deep in a C++ wait."""

import faulthandler
import os
import signal
from typing import BinaryIO

_SIGNAL = signal.SIGRTMAX - 7  # as in src/comm/flight_ring.h
_kept: list[BinaryIO] = []  # faulthandler does not hold the file


def answer_stack_signals() -> None:
    """Registers faulthandler on the signal if DEEPTIDE_STACKS_FD names the launcher's file."""
    text = os.environ.get("DEEPTIDE_STACKS_FD", "")
    if _kept or not text.isdecimal():
        return
    try:
        if not os.readlink(f"/proc/self/fd/{text}").startswith("/memfd:deeptide-stacks"):
            return
        file = os.fdopen(int(text), "wb", buffering=0, closefd=False)
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return
        faulthandler.register(_SIGNAL, file=file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return  # a report less, never a training less
    _kept.append(file)
