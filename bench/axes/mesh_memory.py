#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what a GPT at stage 3 takes on four ranks with two pipeline stages and without; prints Markdown.

Bytes of the tables are the engine's own count, each beside its forecast. The job's bytes are the kernel's, of all
processes, from the second step on.
"""

import argparse
import json
import time
from pathlib import Path

import deeptide
import torch
from deeptide import zero

import output
import task
from contenders.zero_config import zero_config
from jobs import run_watched, script
from settings import SIZES

RANKS, SAMPLES = 4, 16  # of a step, over all ranks
MESHES = {"data 4": {}, "pipeline 2 x data 2": {"pipeline": 2}}
LEGEND = """\
Four ranks of one thread at stage 3, as if each had a host of its own (no shared memory), 16 samples in a step, one in a
micro-batch, AdamW. MiB: of the largest rank each, measured, and its forecast in brackets. Losses are of the last step.
"""


def measure(options):
    """One rank: its table of memory, the seconds of each step, and the last loss."""
    torch.set_num_threads(1)
    size = SIZES[options.model]
    deeptide.init_distributed()
    with zero.Init():
        model = task.make_model(size)
    replicas = RANKS // MESHES[options.mesh].get("pipeline", 1)
    config = zero_config(3, options.precision, size) | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SAMPLES // replicas,
        "parallel": MESHES[options.mesh],
        "deeptide": {"shared_memory": False},
    }
    config.pop("train_batch_size", None)
    engine = deeptide.initialize(model=model, config=config)[0]
    draws = torch.Generator().manual_seed(1)
    seconds = []
    for step in range(options.steps):
        if step == 1:
            steady = time.monotonic()
        tokens = torch.randint(0, size.vocabulary, (SAMPLES, size.context + 1), generator=draws)
        mine = tokens.view(replicas, -1, size.context + 1)[engine.data_parallel_rank].split(1)
        begin = time.perf_counter()
        loss = engine.train_batch((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in mine)
        seconds.append(time.perf_counter() - begin)
    return {
        "memory": {line.role: (line.measured_bytes, line.predicted_bytes) for line in engine.memory()},
        "seconds": seconds[1:],
        "steps_between": (steady, time.monotonic()),
        "loss": loss.item(),
    }


def row_of(mesh, outcome):
    """One line of the table, of what all ranks measured."""
    ranks = outcome["ranks"]

    def cell(pairs_of_ranks):
        measured, forecast = map(max, zip(*pairs_of_ranks, strict=True))
        return f"{measured / 2**20:.0f} ({forecast / 2**20:.0f})"

    roles = [cell(rank["memory"][role] for rank in ranks) for role in ranks[0]["memory"]]
    total = cell([sum(column) for column in zip(*rank["memory"].values(), strict=True)] for rank in ranks)
    seconds = min(max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True))
    return [mesh, *roles, total, f"{outcome['job_peak'] / 2**20:.0f}", f"{seconds:.1f}", f"{ranks[0]['loss']:.5f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=("46m", "319m"), default="319m")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=3, help="of each mesh")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each mesh")
    parser.add_argument("--mesh", choices=MESHES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-mesh-memory")
    options = parser.parse_args()
    if options.mesh:
        options.result.write_text(json.dumps(measure(options)))
        return
    record, lines = output.new_record(), []
    of_model = ["--model", options.model, "--precision", options.precision, "--steps", str(options.steps)]
    for mesh in MESHES:
        outcome = run_watched([*script("mesh_memory"), "--mesh", mesh, *of_model], RANKS, options.timeout)
        if "ranks" not in outcome:
            raise SystemExit(f"{mesh}: {outcome.get('error')}\n" + "\n".join(outcome.get("logs", [])))
        record[mesh] = outcome
        lines.append(row_of(mesh, outcome))
    roles = list(record["data 4"]["ranks"][0]["memory"])
    head = output.head(f"Memory of {options.model} parameters at stage 3, {options.precision}", record, LEGEND)
    header = ["mesh", *roles, "all", "job", "step (s)", "loss"]
    output.write(options, head + output.table(header, lines), record)


if __name__ == "__main__":
    main()
