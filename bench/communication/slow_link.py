#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times steps of two ranks over a slow link: Adam, and 1-bit Adam in its warm-up and by signs; prints Markdown.

The link joins two network namespaces of this machine, and tc slows it down: as root.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import output
from jobs import script
from links import address_of, slow_hosts
from settings import SIZES

WORLD = 2
PORT = 29500  # each namespace has ports of its own
CASES = [("AdamW", 0), ("AdamW", 2), ("OneBitAdam", 0)]
LEGEND = """\
Two ranks of one thread on one machine, each in a network namespace whose link sends and receives at most at the rate
given (tc's token bucket). The ranks share no memory. fp32; median over the steps, on the slower rank. Sent: by
one rank in one step, as the engine counts it (StepOutcome.sent_bytes)."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each kind")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before each kind")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a job")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="folder to import from")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-link")
    return parser.parse_args()


# -- one rank ---------------------------------------------------------------------------------------------------------


def config_of(case, size, freeze):
    type, stage = CASES[case]
    params = {"lr": size.learning_rate} | ({"freeze_step": freeze} if type == "OneBitAdam" else {})
    return {
        "train_micro_batch_size_per_gpu": size.batch,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": type, "params": params},
        "deeptide": {"shared_memory": False},
    }


def measure(options):
    """{"gradients" | "signs": {"seconds": a step, "sent": bytes}}."""
    import deeptide
    import torch

    from task import make_batches, make_model

    torch.set_num_threads(1)
    size, count = SIZES[options.model], options.warmup + options.steps
    model = make_model(size)
    engine, *_ = deeptide.initialize(model=model, config=config_of(options.case, size, freeze=count))
    batches, seconds, sent = make_batches(size, options.rank), [], []
    kinds = ["gradients"] + ["signs"] * (CASES[options.case][0] == "OneBitAdam")
    for step in range(count * len(kinds)):
        begin = time.perf_counter()
        engine.backward(engine(*batches[step % len(batches)]))
        sent.append(engine.step().sent_bytes)
        seconds.append(time.perf_counter() - begin)
    timed = {kind: slice(i * count + options.warmup, (i + 1) * count) for i, kind in enumerate(kinds)}
    return {kind: {"seconds": median(seconds[part]), "sent": sent[part][-1]} for kind, part in timed.items()}


# -- the job ----------------------------------------------------------------------------------------------------------


def run_job(case, options):
    """The figures that the slower rank measured."""
    with slow_hosts(options.rate, WORLD) as names, tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder:
        ranks, results = [], [Path(folder, f"{rank}.json") for rank in range(WORLD)]
        for rank, name in enumerate(names):
            own = {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": address_of(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(options.deeptide.resolve()),
            }  # fmt: skip
            words = [
                "--model", options.model, "--steps", str(options.steps), "--warmup", str(options.warmup),
                "--rank", str(rank), "--case", str(case), "--result", str(results[rank]),
            ]  # fmt: skip
            command = ["ip", "netns", "exec", name, *script("slow_link"), *words]
            ranks.append(subprocess.Popen(command, env={**os.environ, **own}))
        try:
            codes = [rank.wait(timeout=options.timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{CASES[case]}: ranks ended with {codes}")
        measured = [json.loads(result.read_text()) for result in results]
    return {kind: max((rank[kind] for rank in measured), key=lambda one: one["seconds"]) for kind in measured[0]}


def markdown(record):
    rows = []
    for (type, stage), kinds in zip(CASES, record["cases"], strict=True):
        for kind, one in kinds.items():
            rows.append([type, stage, kind, f"{one['seconds']:.2f}", f"{one['sent'] / 1e6:.2f}"])
    header = ["optimizer", "stage", "ranks exchange", "step (s)", "sent (MB)"]
    title = f"Steps over a link of {record['rate']}, {record['model']}"
    return output.head(title, record, LEGEND) + "\n" + output.table(header, rows)


def main():
    options = parse_arguments()
    if options.rank is not None:
        options.result.write_text(json.dumps(measure(options)))
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    record = output.new_record() | {"rate": options.rate, "model": options.model}
    record["cases"] = [run_job(case, options) for case in range(len(CASES))]
    output.write(options, markdown(record), record)


if __name__ == "__main__":
    main()
