# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of observing.py: steps two engines by turns, one of them observed, and writes their times as JSON.

For `top` there is one engine, which the parent looks at for some seconds at a time.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import deeptide
import torch

import task
from contenders.zero_config import zero_config
from settings import SIZES

MONITORS = ("csv_monitor", "tensorboard")


def off_sections():
    """Every observer's section is there, and off."""
    sections = {name: {"enabled": False} for name in (*MONITORS, "comms_logger", "flops_profiler")}
    own = {name: {"enabled": False} for name in ("jsonl_monitor", "timeline")}
    return sections | {"wall_clock_breakdown": False, "memory_breakdown": False, "deeptide": own}


def sections_of(observer, folder, steps):
    """The sections that an observer adds to the configuration."""
    to_files = {"enabled": True, "output_path": folder, "job_name": observer}
    found = {
        "nothing": {},
        "off": off_sections(),
        "wall_clock_breakdown": {"wall_clock_breakdown": True, "steps_per_print": 10},
        "memory_breakdown": {"memory_breakdown": True, "steps_per_print": 10},
        "comms_logger": {"comms_logger": {"enabled": True}},
        "jsonl_monitor": {"deeptide": {"jsonl_monitor": to_files}},
        "timeline": {
            "deeptide": {"timeline": {"enabled": True, "output_path": folder, "start_step": 2, "num_steps": steps}}
        },
        **{name: {name: to_files} for name in MONITORS},
    }
    found["all"] = {key: value for name in ("wall_clock_breakdown", "memory_breakdown", "comms_logger", *MONITORS)
                    for key, value in found[name].items()}  # fmt: skip
    found["all"]["deeptide"] = found["jsonl_monitor"]["deeptide"] | found["timeline"]["deeptide"]
    return found[observer]


OBSERVERS = ("nothing", "off", "wall_clock_breakdown", "memory_breakdown", "comms_logger", *MONITORS)
OBSERVERS += ("jsonl_monitor", "timeline", "all", "top")
SETTLING = 2  # steps after someone begins to look, or ends: one of them counts operators


def make(options, size, extra):
    config = zero_config(options.stage, options.precision, size) | extra
    return deeptide.initialize(model=task.make_model(size), config=config)[0]


def time_step(engine, batch):
    """Returns seconds, and those of processors in all threads of this rank."""
    torch.distributed.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    engine.backward(engine(*batch))
    engine.step()
    return time.perf_counter() - begin, time.process_time() - busy


def measure(options, folder):
    size = SIZES[options.model]
    torch.set_num_threads(1)
    deeptide.init_distributed()
    batches = task.make_batches(size, torch.distributed.get_rank())
    steps = options.warmup + options.steps
    engines = [make(options, size, {}), make(options, size, sections_of(options.observer, folder, steps))]
    seconds = [[], []]
    for step in range(steps):
        order = (0, 1) if step % 2 == 0 else (1, 0)
        for which in order:
            took = time_step(engines[which], batches[step % len(batches)])
            if step >= options.warmup:  # the second step under a breakdown counts operators, the first ones take pages
                seconds[which].append(took)
    for engine in engines:
        engine.destroy()
    return {"plain": seconds[0], "observed": seconds[1]}  # [(seconds, processor's seconds) of each step]


def measure_watched(options):
    """Until there are enough steps of both kinds on rank 0, which tells the other."""
    size = SIZES[options.model]
    torch.set_num_threads(1)
    deeptide.init_distributed()
    batches = task.make_batches(size, torch.distributed.get_rank())
    engine = make(options, size, {})
    found, was_watched, since = {"plain": [], "observed": []}, False, 0
    enough = torch.zeros(1)
    step = 0
    while not enough:
        took = torch.tensor(time_step(engine, batches[step % len(batches)]), dtype=torch.float64)
        torch.distributed.all_reduce(took[:1], op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(took[1:])
        is_watched = engine._core.step_times().total > 0
        since = since + 1 if is_watched == was_watched else 0
        was_watched = is_watched
        if step >= options.warmup and since >= SETTLING:
            found["observed" if is_watched else "plain"].append(took.tolist())
        enough[0] = min(map(len, found.values())) >= options.steps
        torch.distributed.broadcast(enough, 0)
        step += 1
    engine.destroy()
    return {kind: seconds[: options.steps] for kind, seconds in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observer", choices=OBSERVERS, required=True)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    if options.observer == "top":
        found = measure_watched(options)
        if torch.distributed.get_rank() == 0:
            options.result.write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.result.write_text(json.dumps(measure(options, folder)))


if __name__ == "__main__":
    main()
