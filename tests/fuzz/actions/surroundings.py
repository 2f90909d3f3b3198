# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Acts around a rank while it trains, which must change nothing: forks, memory that lies idle, a limit."""

import atexit
import gc
import os
import resource
import select

import torch

MIB = 1 << 20
ENDS_WITHIN = 30  # seconds, for a forked child that has nothing to do


def _end_as(way, rank):
    """Ends a forked child: at once, after its exit handlers, or after it let go of all that it inherited."""
    if way == "handlers":
        atexit._run_exitfuncs()
    elif way == "collect":
        rank.__dict__.clear()
        gc.collect()
    os._exit(0)


def fork(rank, act):
    if not rank.own(act.get("on", True)):
        return None
    child = os.fork()
    if child == 0:
        try:
            _end_as(act["way"], rank)
        finally:
            os._exit(1)
    watch = os.pidfd_open(child)
    ended, _, _ = select.select([watch], [], [], ENDS_WITHIN)
    os.close(watch)
    if not ended:
        os.kill(child, 9)
    return {"child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def idle(rank, act):
    """Leaves memory in the process's heap that nothing uses any more."""
    kept = [torch.ones(act["mib"] * MIB // 16) for _ in range(4)]
    del kept
    return {}


def _address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def squeeze(rank, act):
    """Lets the process map little more than it has mapped; `mib` None: as much as it likes, again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if act["mib"] is None else _address_space() + act["mib"] * MIB
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return {}


ACTS = {"fork": fork, "idle": idle, "squeeze": squeeze}


def expected(act, on):
    """A rank's view of it, on any of both sides."""
    return ({"child": 0} if act["act"] == "fork" else {}) if on else None
