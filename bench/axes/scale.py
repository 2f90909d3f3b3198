#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the forecast of a step with steps that ran, over small meshes on this machine; prints Markdown.

The rates are measured first: of products by two jobs at once of one rank each, which train the uncut model; of the link
by sums of a layer's activations.
"""

import argparse
import dataclasses
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import deeptide
import torch
from deeptide import zero
from deeptide._forecast.gpt import GPT
from deeptide._forecast.steps import Rates

import output
from jobs import run_ranks, script
from memory import JobMemory

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, GAS = 6, 768, 12, 4096, 128, 8
SUMS = 4 * LAYERS * GAS  # inside layers, in one step of tensor ranks
MESHES = {"alone": {}, "pipeline 2": {"pipeline": 2}, "tensor 2": {"tensor": 2}, "data 2": {}}
LEGEND = """\
A GPT of 6 layers, width 768, 128 tokens in a sample, 8 micro-batches of 2, fp32, one thread for each rank. Forecast: by
`deeptide.plan` at the flops of two jobs at once of one rank each, and the bytes in a second of sums between two ranks.
Steps are medians of the slower rank.
"""


def config_of(mesh):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "parallel": MESHES[mesh],
        "zero_optimization": {"stage": 1},
    }


def batch_of():
    tokens = (torch.arange(2 * LENGTH) * 7 % VOCABULARY).view(2, LENGTH)
    return {"input_ids": tokens, "labels": tokens}


def train(mesh, steps):
    """One rank: the seconds of each step."""
    torch.set_num_threads(1)
    model = GPT(LAYERS, WIDTH, HEADS, VOCABULARY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    engine = deeptide.initialize(model=model, config=config_of(mesh))[0]
    seconds = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        engine.train_batch(iter([batch_of()] * GAS))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[2:]}


def time_sums(steps):
    """One rank: the seconds of sums of a layer's activations, each time of as many as a step has."""
    torch.set_num_threads(1)
    engine = deeptide.initialize(model=GPT(1, WIDTH, HEADS, VOCABULARY), config=config_of("tensor 2"))[0]
    activations, seconds = torch.ones(2 * LENGTH, WIDTH), []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        for _ in range(SUMS):
            engine.tensor_team.core.all_reduce(activations, "forward")
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[2:]}


def forecast(mesh, ranks, rates):
    with zero.Init():
        model = GPT(LAYERS, WIDTH, HEADS, VOCABULARY)
    return deeptide.plan(model, config_of(mesh), ranks, batch=batch_of(), rates=rates).step.seconds


def measured(mesh, ranks, options):
    command = [*script("scale"), "--rank-of", mesh, "--steps", str(options.steps)]
    outcome = run_ranks(command, ranks, options.timeout, JobMemory())
    if "ranks" not in outcome:
        raise SystemExit(f"{mesh}: {outcome.get('error', outcome)}")
    return median(max(step) for step in zip(*(rank["seconds"] for rank in outcome["ranks"]), strict=True))


def rates_of(options):
    """Those of this machine while both ranks are at work."""
    with ThreadPoolExecutor(2) as pool:
        alone = max(pool.map(lambda _: measured("alone", 1, options), range(2)))
    unit = forecast("alone", 1, Rates(1e9, 1e15, 1e15, 1e15))
    link = SUMS * 2 * LENGTH * WIDTH * 4 / measured("sums", 2, options)
    return Rates(1e9 * unit / alone, link, link, options.memory)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each mesh, timed")
    parser.add_argument("--memory", type=float, default=8e9, help="bytes that the optimizer moves in a second")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each mesh")
    parser.add_argument("--rank-of", choices=[*MESHES, "sums"], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-scale")
    options = parser.parse_args()
    if options.rank_of:
        done = time_sums(options.steps) if options.rank_of == "sums" else train(options.rank_of, options.steps)
        options.result.write_text(json.dumps(done))
        return
    record, lines = output.new_record(), []
    rates = rates_of(options)
    record["rates"] = dataclasses.asdict(rates)
    print(rates, file=sys.stderr)
    for mesh in list(MESHES)[1:]:
        took, expected = measured(mesh, 2, options), forecast(mesh, 2, rates)
        record[mesh] = {"measured": took, "forecast": expected}
        off = f"{100 * (expected / took - 1):+.1f} %"
        lines.append([mesh, f"{1e3 * took:.0f}", f"{1e3 * expected:.0f}", off])
    head = output.head("Scale: forecasts beside steps, 2 ranks", record, LEGEND)
    output.write(options, head + output.table(["mesh", "measured (ms)", "forecast (ms)", "off by"], lines), record)


if __name__ == "__main__":
    main()
