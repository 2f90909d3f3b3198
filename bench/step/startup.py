#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times what comes before the first step: importing a framework, and `initialize` of a model; prints Markdown."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import output
import report
from contenders import CONTENDERS
from jobs import run_job
from settings import SIZES

# In a fresh process, torch first: what remains is the framework's own.
IMPORT = """
import time, {first}
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin)
"""
# Deeptide loads its core with the first name that needs it; the second of its lines says what a program pays, the third
# what a script for DeepSpeed does.
IMPORTS = {
    "import torch": "sys",
    "import deeptide": "torch",
    "from deeptide import initialize": "torch",
    "from deeptide.as_deepspeed.initialize import initialize": "torch",
    "from deepspeed import initialize": "torch",
}  # by statement: what is imported before, untimed
LEGEND = """\
Import: in fresh processes by turns, after one of each that is not counted; what builds on torch after torch, which is
not in its time. Set-up: from the model in plain torch, built on every rank, to the return of `initialize` on the
slower of 2 ranks; torch's packages are imported by then, the processes connected."""


def parse_arguments():
    built = output.ROOT / "build" / "python"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="319m")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["deepspeed-3", "deeptide-3"],
                        metavar="NAME,...", help=f"of {', '.join(CONTENDERS)}")  # fmt: skip
    parser.add_argument("--imports", type=int, default=10, help="processes for each import")
    parser.add_argument("--rounds", type=int, default=3, help="fresh jobs of each contender")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a job")
    parser.add_argument("--deeptide", type=Path, default=built if built.is_dir() else None,
                        help="folder to import deeptide from; none: the one installed")  # fmt: skip
    output.add_arguments(parser, "bench-startup")
    options = parser.parse_args()
    options.warmup, options.steps = 1, 1
    if unknown := [name for name in options.only if name not in CONTENDERS]:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(CONTENDERS)}")
    return options


def time_imports(options):
    """{statement: seconds}; one that fails is left out."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if options.deeptide:
        environment["PYTHONPATH"] = str(options.deeptide)
    seconds = {statement: [] for statement in IMPORTS}
    for number in range(options.imports + 1):
        for statement, first in IMPORTS.items():
            script = IMPORT.format(first=first, statement=statement)
            done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True,
                                  timeout=60, check=False)  # fmt: skip
            if done.returncode != 0:
                print(f"{statement}: {done.stderr[-500:]}", file=sys.stderr)
            elif number:
                seconds[statement].append(float(done.stdout.split()[-1]))
    return {name: values for name, values in seconds.items() if values}


def time_setups(options):
    jobs = []
    for number in range(1, options.rounds + 1):
        for name in options.only if number % 2 else reversed(options.only):
            allocator = "its own" if name.startswith("deeptide") else "default"
            outcome = run_job(name, "fp32", allocator, options)
            jobs.append({"contender": name, "round": number, **outcome})
            words = f"{report.setup_seconds(outcome):.2f} s" if "ranks" in outcome else outcome.get("error", "skipped")
            print(f"round {number}, {name}: {words}", file=sys.stderr, flush=True)
    return jobs


def markdown(record, model):
    imports = [
        (name, f"{min(values) * 1e3:.0f}", f"{median(values) * 1e3:.0f}", len(values))
        for name, values in record["imports"].items()
    ]
    setups = []
    for name in dict.fromkeys(job["contender"] for job in record["jobs"]):
        jobs = [job for job in record["jobs"] if job["contender"] == name]
        seconds = [report.setup_seconds(job) for job in jobs if "ranks" in job]
        lost = next((job.get("skipped") or job["error"] for job in jobs if "ranks" not in job), "")
        times = (f"{min(seconds):.2f}", f"{median(seconds):.2f}") if seconds else ("", "")
        setups.append((name, *times, len(seconds), lost))
    return "\n".join([
        output.head("Start-up", record, LEGEND),
        "## Import\n",
        output.table(("statement", "best (ms)", "median (ms)", "processes"), imports),
        f"## Set-up, {model}, fp32\n",
        output.table(("contender", "best (s)", "median (s)", "jobs", "failed"), setups),
    ])  # fmt: skip


def main():
    options = parse_arguments()
    record = output.new_record()
    record["imports"] = time_imports(options)
    record["jobs"] = time_setups(options)
    output.write(options, markdown(record, options.model), record)
    sys.exit(int(any("error" in job for job in record["jobs"])))


if __name__ == "__main__":
    main()
