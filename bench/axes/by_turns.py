# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of several contenders in one job, by turns: each once, every other turn in reverse order, from a barrier."""

import time

import torch.distributed as dist


def step_by_turns(contenders, draw, options):
    """{"seconds", "losses"}: by name, of each step; seconds without the warm-up's. draw: a turn's arguments of step."""
    seconds, losses = {name: [] for name in contenders}, {name: [] for name in contenders}
    for turn in range(options.warmup + options.steps):
        given = draw()
        for name in list(contenders) if turn % 2 == 0 else list(reversed(contenders)):
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(contenders[name].step(*given))
            if turn >= options.warmup:
                seconds[name].append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses}
