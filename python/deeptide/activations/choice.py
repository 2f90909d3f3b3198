# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks keep nothing in memory for backward, so that activations fit a budget, at the least time."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

_LEVELS = 2048  # of the bytes that are kept: the search counts in so many parts of the budget


_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def budget_of(section: dict[str, Any]) -> int | None:
    """Bytes that "activation_checkpointing" allows, whose "memory" has been checked; None where it says none."""
    given = section["memory"]
    if not isinstance(given, str):
        return None if given is None else int(given)
    count = bytes_of(given)
    assert count is not None, given
    return count


def bytes_of(text: str) -> int | None:
    """The bytes that a size such as 80GB or 64GiB names; None where it is none."""
    match = re.fullmatch(r"([0-9.]+) *([KMGT]?)(i?)B", text)
    if match is None:
        return None
    scale: int = (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return round(float(match[1]) * scale)


class Measured(NamedTuple):
    """One block of one micro-batch. bytes: what its backward needs, but for its inputs; nanoseconds: of its forward."""

    bytes: int
    input_bytes: int
    nanoseconds: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fate of each block's activations. Units: bytes of one rank, over the micro-batches that are alive."""

    policy: str  # "recompute", "host", "files" or "auto"
    blocks: list[str]  # their paths in the model, in order
    recomputed: list[str]  # those that backward computes again
    budget_bytes: int | None = None  # with "auto"
    predicted_bytes: int | None = None  # the peak with this choice; None: not measured
    kept_bytes: int | None = None  # the peak without recomputation
    least_bytes: int | None = None  # the peak if all blocks were recomputed
    recomputed_seconds: float | None = None  # that recomputation takes for one micro-batch
    live: int = 1  # micro-batches whose activations are alive at once
    host_bytes: int = 0  # the most that lay in the host's memory, with "host"
    in_files: list[str] = dataclasses.field(default_factory=list)  # blocks whose activations go to files
    file_bytes: int = 0  # the most that lay in files
    files_seconds: float | None = None  # that files add to one micro-batch, with "auto"

    @property
    def is_pending(self) -> bool:
        """Whether the first step, which measures, is still to come: until then all blocks are recomputed."""
        return self.policy == "auto" and self.predicted_bytes is None

    def __str__(self) -> str:
        if self.policy == "host":
            return f"activations: what {len(self.blocks)} blocks keep goes to the host's memory until backward"
        if self.policy == "files":
            return f"activations: what {len(self.blocks)} blocks keep goes to files until backward"
        if self.policy == "recompute":
            return f"activations: {len(self.blocks)} blocks are recomputed in backward"
        if self.is_pending:
            return (
                f"activations: at most {size(self.budget_bytes)}; the first step recomputes all {len(self.blocks)} "
                "blocks and measures which must be"
            )
        which = f"{len(self.recomputed)} of {len(self.blocks)} blocks are recomputed{_names(self.recomputed)}"
        seconds = f", {1e3 * (self.recomputed_seconds or 0):.1f} ms a micro-batch" if self.recomputed else ""
        if self.in_files:
            seconds += f", what {len(self.in_files)}{_names(self.in_files)} keep goes to files"
            seconds += f", {1e3 * (self.files_seconds or 0):.1f} ms"
        return (
            f"activations: {which}{seconds}: {size(self.predicted_bytes)} of the {size(self.budget_bytes)} allowed; "
            f"without recomputation {size(self.kept_bytes)}"
        )


def size(count: int | None) -> str:
    """In words: "6.00 GiB"."""
    count = count or 0
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names)})" if len(names) <= 2 else f" ({names[0]} to {names[-1]})"


def peak(blocks: Sequence[Measured], again: Sequence[bool], outside: int, live: int) -> int:
    """Bytes at the fullest moment of a step.

    Either all forwards that are alive are done, or one of them is in backward and a recomputed block is whole beside
    what the blocks before it keep: those after it are done with then. outside: bytes that are kept beside the blocks.
    """
    kept = sum(block.bytes for block, redone in zip(blocks, again, strict=True) if not redone)
    most, before = live * kept, 0
    for block, redone in zip(blocks, again, strict=True):
        if redone:
            most = max(most, (live - 1) * kept + before + block.bytes)
        else:
            before += block.bytes
    return live * (outside + sum(block.input_bytes for block in blocks)) + most


def alike(blocks: Sequence[Measured], kinds: Sequence[str]) -> list[Measured]:
    """The blocks with one time for each kind that keeps equal bytes: what differs between them is noise."""
    times: dict[tuple[str, int], list[int]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        times.setdefault((kind, block.bytes), []).append(block.nanoseconds)
    return [
        block._replace(nanoseconds=max(int(statistics.median_low(times[kind, block.bytes])), 1))
        for block, kind in zip(blocks, kinds, strict=True)
    ]


def choose(blocks: Sequence[Measured], outside: int, live: int, budget: int) -> list[bool] | None:
    """Whether each block is recomputed or put away: the least time whose peak is within the budget. None: none is.

    At equal times, earlier blocks are recomputed: they are at the end of backward, when the later ones keep nothing any
    more. With several micro-batches alive the time is the least of those that leave room for the largest block, or of
    those that were found without that.
    """
    none, every = [False] * len(blocks), [True] * len(blocks)
    if peak(blocks, none, outside, live) <= budget:
        return none
    if peak(blocks, every, outside, live) > budget:
        return None
    room = budget - live * (outside + sum(block.input_bytes for block in blocks))
    found = _ways(blocks, live, room)
    if live > 1:
        found += _ways(blocks, live, room - max(block.bytes for block in blocks))
    redone = [(time, [not keep for keep in keeps]) for time, keeps in found]
    fitting = [(time, again) for time, again in redone if peak(blocks, again, outside, live) <= budget]
    least = min((time for time, _ in fitting), default=None)
    return max((again for time, again in fitting if time == least), default=every)


def _ways(blocks: Sequence[Measured], live: int, room: int) -> list[tuple[int, tuple[bool, ...]]]:
    """A knapsack, block by block: (time, whether each is kept), the fastest for each number of bytes kept."""
    step = max(room // _LEVELS, 1)
    found: dict[int, tuple[int, tuple[bool, ...]]] = {0: (0, ())}  # by steps kept of one micro-batch, rounded up
    for block in blocks:
        own = -(-block.bytes // step)
        following: dict[int, tuple[int, tuple[bool, ...]]] = {}
        for kept, (time, keeps) in found.items():
            ways = []
            if live > 1 or kept + own <= room // step:  # it is whole beside what is kept before it
                ways.append((kept, (time + block.nanoseconds, (*keeps, False))))
            if live * (kept + own) <= room // step:
                ways.append((kept + own, (time, (*keeps, True))))
            for key, way in ways:
                following[key] = min(following.get(key, way), way)
        found = following
    return list(found.values())
