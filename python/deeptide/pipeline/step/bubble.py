# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The share of a step in which stages have nothing to do: measured, and as the schedule's formula has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bubble(NamedTuple):
    """Shares of all stages' time, 0 to 1. measured: of the last step; formula: with equal stages and free letters."""

    measured: float
    formula: float

    def __str__(self) -> str:
        return f"bubble: {100 * self.measured:.1f} % measured, {100 * self.formula:.1f} % by the schedule's formula"


def measured_bubble(times: Sequence[tuple[float, float]]) -> float:
    """Takes each stage's (seconds of its instructions, seconds of them that it waited): stages begin together.

    The step lasts as long as its longest stage; what a stage neither computes nor sends in that time is idle.
    """
    longest = max((whole for whole, _ in times), default=0.0)
    if longest <= 0.0:
        return 0.0
    busy = sum(whole - waited for whole, waited in times)
    return 1.0 - busy / (longest * len(times))
