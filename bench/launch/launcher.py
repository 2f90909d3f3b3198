# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The cost of launching: the command itself, the way to a script's first line, many ranks over hosts, a rank's end.

    sudo env PATH=$PWD/build/bin:$PATH python bench launcher [--deepspeed PATH/TO/deepspeed] [--json FILE]

Hosts are network namespaces, made as in tests/hosts (root only; without, those lines are left out). Each figure is the
median of several runs in milliseconds, the smallest and largest beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hosts"))
from network import Network, missing_reason

FIRST_LINE = "import os, time; os.write(1, f'first {time.time()}\\n'.encode())\n"  # one write: lines must not mix


def milliseconds(measure, runs: int) -> dict[str, float]:
    values = [1000 * measure() for _ in range(runs)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": runs}


def took(words, **settings) -> float:
    started = time.monotonic()
    subprocess.run(words, check=True, capture_output=True, **settings)
    return time.monotonic() - started


def until_first_lines(words, count: int, **settings) -> float:
    """From the command to the last rank's first line; the ranks tell the time themselves."""
    started = time.time()
    done = subprocess.run(words, capture_output=True, text=True, **settings)
    times = [float(line.split("first ")[1]) for line in done.stdout.splitlines() if "first " in line]
    assert len(times) == count, done.stdout + done.stderr
    return max(times) - started


def until_end_after_kill(words) -> float:
    """From the death of the last rank that said its process id to the launcher's end."""
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(job.stdout.readline().split("pid ")[1]) for _ in range(2)]
    time.sleep(0.3)
    started = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    job.wait(30)
    return time.monotonic() - started


def on_this_machine(folder: Path, deepspeed: str | None) -> dict:
    deeptide = shutil.which("deeptide")
    script = folder / "first.py"
    script.write_text(FIRST_LINE)
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"worker-{i} slots=8\n" for i in range(8)))
    python = ["--python", sys.executable]
    stay = ["sh", "-c", "echo pid $$; exec sleep 100"]
    results = {
        "deeptide --help": milliseconds(lambda: took([deeptide, "--help"]), 30),
        "deeptide --dry-run, 2 ranks": milliseconds(
            lambda: took([deeptide, "--dry-run", "--num_gpus", "2", "true"]), 30
        ),
        "deeptide --dry-run, 8 hosts x 8": milliseconds(
            lambda: took([deeptide, "-H", str(hostfile), "--dry-run", "true"]), 30
        ),
        "python to its first line": milliseconds(lambda: until_first_lines([sys.executable, script], 1), 15),
        "2 pythons at once to their first lines": milliseconds(
            lambda: until_first_lines(["sh", "-c", f"{sys.executable} {script} & {sys.executable} {script}; wait"], 2),
            15,
        ),
        "deeptide, 2 ranks, to their first lines": milliseconds(
            lambda: until_first_lines([deeptide, "-q", "--num_gpus", "2", *python, script], 2), 15
        ),
        "deeptide: a rank killed, to the end of the job": milliseconds(
            lambda: until_end_after_kill([deeptide, "-q", "--num_gpus", "2", *stay]), 10
        ),
    }
    if deepspeed:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        words = [deepspeed, "--num_gpus", "2", "--no_local_rank", script]
        results["deepspeed, 2 ranks, to their first lines"] = milliseconds(
            lambda: until_first_lines(words, 2, env=environment, cwd=folder), 3
        )
    return results


def over_hosts(folder: Path) -> dict:
    reason = missing_reason()
    if reason:
        print(f"no hosts here: {reason}", file=sys.stderr)
        return {}
    deeptide = shutil.which("deeptide")
    network = Network(8)
    try:

        def words(slots, *command):
            options = ["-q", "-H", str(network.hostfile(*slots)), "--launcher_args", network.ssh_arguments]
            return network.head.command(deeptide, *options, *command)

        def first_lines(slots):
            command = ("sh", "-c", "echo first $(date +%s.%N)")
            return milliseconds(lambda: until_first_lines(words(slots, *command), sum(slots)), 5)

        results = {}
        for slots in ((1,), (1,) * 8, (8,) * 8):
            name = f"{sum(slots)} light ranks on {len(slots)} hosts"
            results[f"{name}: to the last one's first line"] = first_lines(slots)
            results[f"{name}: start and end"] = milliseconds(lambda s=slots: took(words(s, "true")), 5)
        stay = ("sh", "-c", "echo pid $$; exec sleep 100")
        results["2 hosts: a rank killed, to the end of the job"] = milliseconds(
            lambda: until_end_after_kill(words((1, 1), *stay)), 5
        )
        ssh = ["ssh", "-F", f"{network.folder}/ssh_config", "worker-1", "true"]
        results["one ssh for comparison"] = milliseconds(lambda: took(network.head.command(*ssh)), 5)
        return results
    finally:
        network.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", help="DeepSpeed's launcher, to measure it beside ours")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder:
        results = on_this_machine(Path(folder), args.deepspeed) | over_hosts(Path(folder))
    for name, value in results.items():
        print(f"{name:58} {value['median']:9.1f} ms   ({value['min']:.1f} - {value['max']:.1f}, {value['runs']} runs)")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
