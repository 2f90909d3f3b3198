# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of contenders that live at the same time, each in a job of its own, with an allocator of its own, by turns."""

import sys
import time
from pathlib import Path

from jobs import run_ranks
from memory import JobMemory
from settings import WORLD
from turns import Turns, add_arguments, run_by_turns

TUNED = ", tuned"  # behind the name of a contender whose glibc keeps its memory


def run_contenders(names, command, timeout):
    """{"ranks": {name: what each rank measured}}, or {"error": reason, "logs": [...]} of the first that failed.

    command: of the worker, which is given a name, and makes that contender.
    """

    def run(name, words, settings):
        allocator = "its own" if name.startswith("deeptide") else "tuned" if name.endswith(TUNED) else "default"
        return run_ranks([*command, *words], WORLD, timeout, JobMemory(), allocator, **settings)

    found = run_by_turns(names, run)
    for name, outcome in found.items():
        if "ranks" not in outcome and not outcome["error"].startswith("stopped"):
            print(name, *outcome["logs"], sep="\n", file=sys.stderr)
            return {**outcome, "error": f"{name}: {outcome['error']}"}
    return {"ranks": {name: outcome["ranks"] for name, outcome in found.items()}}


def add_worker_arguments(parser):
    add_arguments(parser)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)


def step_by_turns(contender, draw, options):
    """{"seconds", "losses"}: of each step; seconds without the warm-up's. draw: a turn's arguments of step."""
    turns, seconds, losses = Turns(options), [], []
    for turn in range(options.warmup + options.steps):
        given = draw()
        with turns.mine():
            begin = time.perf_counter()
            losses.append(contender.step(*given))
            if turn >= options.warmup:
                seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses}


def slower(ranks):
    """Seconds of each turn's step, by its slower rank."""
    return [max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True)]


def differ(of_contenders):
    """The largest relative difference between contenders' losses of a step, on their last ranks."""
    losses = [ranks[-1]["losses"] for ranks in of_contenders]
    return max((max(step) - min(step)) / max(step) for step in zip(*losses, strict=True))
