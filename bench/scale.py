#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the forecast of a step with steps that ran, over small meshes on this machine; prints Markdown.

The rates are measured first: of products by one rank that trains the uncut model, with as many processes beside it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import deeptide
import torch
from deeptide import zero
from deeptide._forecast.gpt import GPT
from deeptide._forecast.steps import Rates

import output
from jobs import run_ranks
from memory import JobMemory

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, GAS = 8, 256, 4, 1024, 128, 8
MESHES = {"alone": {}, "pipeline 2": {"pipeline": 2}, "tensor 2": {"tensor": 2}, "data 2": {}}
LEGEND = """\
A GPT of 8 layers, width 256, 128 tokens in a sample, 8 micro-batches of 2, fp32, one thread for each rank. Forecast: by
`deeptide.plan` at the flops that one rank alone reached. Steps are medians of the slower rank.
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


def forecast(mesh, ranks, rates):
    with zero.Init():
        model = GPT(LAYERS, WIDTH, HEADS, VOCABULARY)
    return deeptide.plan(model, config_of(mesh), ranks, batch=batch_of(), rates=rates).step.seconds


def measured(mesh, ranks, steps, timeout):
    command = [sys.executable, Path(__file__), "--rank-of", mesh, "--steps", str(steps)]
    outcome = run_ranks(command, ranks, timeout, JobMemory())
    if "ranks" not in outcome:
        raise SystemExit(f"{mesh}: {outcome.get('error', outcome)}")
    return median(max(step) for step in zip(*(rank["seconds"] for rank in outcome["ranks"]), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each mesh, timed")
    parser.add_argument("--link", type=float, default=2e9, help="bytes that a rank sends to its neighbour in a second")
    parser.add_argument("--memory", type=float, default=8e9, help="bytes that the optimizer moves in a second")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each mesh")
    parser.add_argument("--rank-of", choices=MESHES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-scale")
    options = parser.parse_args()
    if options.rank_of:
        options.result.write_text(json.dumps(train(options.rank_of, options.steps)))
        return
    record, lines = output.new_record(), []
    alone = measured("alone", 1, options.steps, options.timeout)
    unit = forecast("alone", 1, Rates(1e9, options.link, options.link, 1e15))
    rates = Rates(1e9 * unit / alone, options.link, options.link, options.memory)
    for mesh in list(MESHES)[1:]:
        took, expected = measured(mesh, 2, options.steps, options.timeout), forecast(mesh, 2, rates)
        record[mesh] = {"measured": took, "forecast": expected}
        off = f"{100 * (expected / took - 1):+.1f} %"
        lines.append([mesh, f"{1e3 * took:.0f}", f"{1e3 * expected:.0f}", off])
    head = output.head("Scale: forecasts beside steps, 2 ranks", record, LEGEND)
    output.write(options, head + output.table(["mesh", "measured (ms)", "forecast (ms)", "off by"], lines), record)


if __name__ == "__main__":
    main()
