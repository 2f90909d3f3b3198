# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of one job: hands the task to a contender, times its steps and writes what it saw as JSON."""

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import contenders
import memory
import task
from settings import SIZES
from turns import Turns, add_arguments


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--model", required=True, choices=SIZES)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def measure(arguments, setup):
    """Times each step from a common start to its return; the losses are this rank's own."""
    size = SIZES[arguments.model]
    batches = task.make_batches(size, int(os.environ["RANK"]))
    model = task.make_model(size)
    dist.barrier()
    begin = time.perf_counter()
    step = setup(model, arguments.precision, size)
    setup_seconds = time.perf_counter() - begin
    del model  # whoever trains it keeps it
    torch.set_num_threads(1)  # again: a framework may have set its own number
    turns = Turns(arguments)
    seconds, busy, losses = [], [], []
    for index in range(arguments.warmup + arguments.steps):
        if index == arguments.warmup:
            setup_peak_rss = memory.peak_rss()  # up to here: building, sharding, states made by the first step
            memory.reset_peak_rss()
            steps_begin, processor_begin = time.monotonic(), time.process_time()
        x, y = batches[index % len(batches)]
        with turns.mine():
            begin, busy_begin = time.perf_counter(), time.process_time()
            loss = step(x, y)
            seconds.append(time.perf_counter() - begin)
            busy.append(time.process_time() - busy_begin)
        losses.append(float(loss.detach()))
    return {
        "setup_seconds": setup_seconds,
        "steps_between": (steps_begin, time.monotonic()),  # on the clock of all processes: the parent watched memory
        "warmup_seconds": seconds[: arguments.warmup],
        "step_seconds": seconds[arguments.warmup :],
        "step_processor_seconds": busy[arguments.warmup :],
        "processor_seconds": (time.process_time() - processor_begin) / arguments.steps,
        "losses": losses,
        "setup_peak_rss": setup_peak_rss,
        "step_peak_rss": memory.peak_rss(),
        "pss": memory.pss(),
    }


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    try:
        setup = contenders.load(arguments.contender)
    except ImportError as error:
        arguments.result.write_text(json.dumps({"skipped": f"cannot be imported: {error}"}))
        sys.exit(1)
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        result = measure(arguments, setup)
    except Exception as error:
        traceback.print_exc()
        arguments.result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    arguments.result.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
