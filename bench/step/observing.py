#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times steps with and without each observer, one after the other in the same processes; prints Markdown."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import output
from jobs import run_ranks, script
from memory import JobMemory
from settings import SIZES, WORLD
from step.observing_worker import OBSERVERS
from step.pairs import difference

LEGEND = """\
Two ranks of one thread. Each turn steps an engine that nobody observes and one that is observed, every other turn in
reverse order; a step begins at a barrier and ends on the slower rank. Difference: the median of each turn's, and its
95 % interval (the sign test's); of a step's time, and of the time of processors that both ranks' threads took, which
does not count what else the machine does. "nothing" compares two plain engines: what noise makes of no difference.
"off": every observer's section is there, with enabled false. Files lie in the folder for temporary files. "top" has one
engine, which `deeptide top` asks once a second, its usual rate, for some seconds at a time; its turns pair steps in
order."""
LOOKING = (12, 22)  # seconds that `top` runs, and that it does not: a rank tells ten seconds longer than it is asked


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="46m")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="of each engine, timed")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(OBSERVERS), help=",".join(OBSERVERS))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each observer")
    output.add_arguments(parser, "bench-observing")
    return parser.parse_args()


def run_looked_at(command, timeout):
    """Runs ranks like run_ranks, in a job of the launcher at which `deeptide top` looks now and then."""
    launcher = shutil.which("deeptide", path=f"{output.ROOT / 'build' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if launcher is None:
        return {"skipped": "no deeptide command in build/bin or PATH"}
    with tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        words = [launcher, "-q", "--num_ranks", str(WORLD), "--python", *map(str, command), "--result", str(result)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out, env=environment) as job:
            end = time.monotonic() + timeout
            while job.poll() is None and time.monotonic() < end:
                look = [launcher, "top", str(job.pid), "--json", "-n", str(LOOKING[0])]
                subprocess.run(look, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(LOOKING[1])
            job.terminate()
        if result.exists():
            return {"ranks": [json.loads(result.read_text())]}
        return {"error": "the job ended without a result", "logs": [log.read_text(errors="replace")[-4000:]]}


def steps_of(ranks, kind):
    """([seconds of the slower rank], [seconds of processors, all ranks together]) of each step."""
    turns = list(zip(*(rank[kind] for rank in ranks), strict=True))
    return [max(wall for wall, _ in turn) for turn in turns], [sum(busy for _, busy in turn) for turn in turns]


def row(observer, outcome):
    if "ranks" not in outcome:
        return [observer, outcome.get("skipped") or outcome["error"], "", "", ""]
    plain, plain_busy = steps_of(outcome["ranks"], "plain")
    observed, observed_busy = steps_of(outcome["ranks"], "observed")
    cells = [f"{1e3 * median(plain):.2f}", f"{1e3 * median(observed):.2f}"]
    return [observer, *cells, difference(plain, observed), difference(plain_busy, observed_busy)]


def main():
    options = parse_arguments()
    record = output.new_record() | {"observers": {}}
    rows = []
    for observer in options.only:
        command = [
            *script("observing_worker"), "--observer", observer, "--model", options.model,
            *("--precision", options.precision),
            *("--stage", str(options.stage), "--steps", str(options.steps), "--warmup", str(options.warmup)),
        ]  # fmt: skip
        if observer == "top":
            found = run_looked_at(command, options.timeout)
        else:
            found = run_ranks(command, WORLD, options.timeout, JobMemory())
        record["observers"][observer] = found
        rows.append(row(observer, found))
        print(*rows[-1], sep="  ", file=sys.stderr)
    title = f"Observing: {options.model}, {options.precision}, stage {options.stage}, {options.steps} turns"
    header = ["observer", "plain (ms)", "observed (ms)", "difference", "of processors' time"]
    output.write(options, output.head(title, record, LEGEND) + output.table(header, rows), record)


if __name__ == "__main__":
    main()
