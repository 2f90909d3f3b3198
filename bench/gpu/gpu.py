#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trains models of the size of a GPU beside plain torch, FSDP2 and DeepSpeed where they are; prints Markdown."""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

import torch

import output
from gpu.gpu_model import SHAPES
from gpu.gpu_worker import CONTENDERS
from jobs import free_port, script

DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}  # flops/s, data sheets
BASELINES = ("torch-masters", "torch")
LEGEND = """\
One rank on one device, bf16 with fp32 masters, every block checkpointed, norm clipped to 1, each job in a process of
its own, in rounds. torch-masters: bf16 weights, fp32 masters and fused AdamW, in plain torch; torch: fp32 weights under
autocast, with more to read and an fp32 residual stream. Step: best and median of all rounds' median steps. Share: of
torch-masters' step (torch's where that did not run), by rounds, then the median. MFU: 6 flops per parameter in a matrix
and token, and causal attention, recomputation not counted, against the device's dense bf16 peak. Peak: what torch's
allocator gave at most; reserved: what it took from the device for that, beyond the peak by what lies in fragments.
States: the ledger's forecast of what the engine itself holds, activations not among it."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=["gpt2-xl", "llama-7b"])
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", default=list(CONTENDERS))
    parser.add_argument("--device", default="cuda", help="cpu tries the benchmark itself, with --model tiny")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=450.0, help="seconds; jobs that would begin later are left out")
    parser.add_argument("--peak-flops", type=float, help="of the device in dense bf16; not given: by its name")
    output.add_arguments(parser, "bench-gpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu: torch finds no GPU here")
    return options


def run_job(options, model, contender):
    command = [*script("gpu_worker"), contender, "--model", model, "--device", options.device]
    command += ["--warmup", options.warmup, "--steps", options.steps]
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment = {**os.environ, **place}
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": " ".join(done.stderr.strip().splitlines()[-1:])}
    return json.loads(done.stdout.splitlines()[-1])


def peak_flops(options):
    if options.peak_flops or options.device != "cuda":
        return options.peak_flops
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in DENSE_BF16.items() if part in name), None)


def _gib(size):
    return "" if size is None else f"{size / 2**30:.1f}"


def row(options, model, contender, results):
    shape, own = SHAPES[model], results[model, contender]
    timed = [job for job in own if "seconds" in job]
    if not timed:
        why = next((job[key] for job in own for key in ("error", "skipped") if key in job), "not run: out of time")
        return [contender, why, *[""] * 7]
    steps = [median(job["seconds"]) for job in timed]
    baseline = next((name for name in BASELINES if results.get((model, name))), "")
    beside = zip(own, results.get((model, baseline), []), strict=False)
    shares = [median(a["seconds"]) / median(b["seconds"]) for a, b in beside if "seconds" in a and "seconds" in b]
    flops = peak_flops(options)
    return [
        contender,
        f"{1000 * min(steps):.1f}, {1000 * median(steps):.1f}",
        f"{median(shares):.3f}" if shares else "",
        f"{shape.tokens_per_step() / min(steps):.0f}",
        f"{100 * shape.flops_per_step() / min(steps) / flops:.1f} %" if flops else "",
        _gib(timed[-1]["peak"]),
        _gib(timed[-1]["reserved"]),
        _gib(timed[-1]["forecast"]),
        f"{timed[-1]['loss']:.4f}",
    ]


def main():
    options = parse_arguments()
    record = output.new_record()
    results = {(model, contender): [] for model in options.model for contender in options.only}
    end = time.monotonic() + options.limit
    for number in range(options.rounds):
        for model in options.model:
            for contender in options.only if number % 2 == 0 else reversed(options.only):
                if time.monotonic() > end:
                    continue
                results[model, contender].append(run_job(options, model, contender))
                print(f"{model} {contender}: {str(results[model, contender][-1])[:150]}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    text = output.head(f"Training on {device}", record, LEGEND)
    sizes = ["peak (GiB)", "reserved (GiB)", "states (GiB)"]
    header = ["contender", "step (ms)", "share", "tokens/s", "MFU", *sizes, "loss"]
    for model in options.model:
        rows = [row(options, model, contender, results) for contender in options.only]
        text += f"\n## {model}\n\n{output.table(header, rows)}"
    jobs = [{"model": model, "contender": contender, "jobs": jobs} for (model, contender), jobs in results.items()]
    output.write(options, text, record | {"jobs": jobs})


if __name__ == "__main__":
    main()
