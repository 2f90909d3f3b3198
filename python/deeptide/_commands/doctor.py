# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide doctor JOB`: sets what a job's steps achieve against what this machine does, and names what limits them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from deeptide._commands.doctor_machine import Machine, measure
from deeptide._commands.run_record import Run

_STEPS = 3  # of every rank, whose mean counts
_LIMIT_S = 120.0
_OF_HOSTS = ("--ssh_port", "--launcher_args", "--venv_script")  # by which the launcher reaches them
_FAR = 2.0  # times as long as the machine needs: then something else limits


@dataclass(frozen=True)
class Step:
    """The parts of a step on the rank that is busy longest. Units: seconds, bytes; zeros where nothing was told."""

    total: float
    computing: float  # the optimizer included
    optimizer: float
    waiting: float  # for other ranks
    files: float
    data: float
    flops: float
    moved_bytes: float  # by operators
    sent_bytes: float
    ranks: int  # on one host
    limit: str  # the engine's own line
    dtype: str = "float32"


# The names that a live job and a record give the fields of Step.
_LIVE = {"total": "total_s", "computing": "computing_s", "optimizer": "optimizer_s", "waiting": "waiting_s"}
_LIVE |= {"files": "files_s", "data": "data_s"}
_TIMES = tuple(_LIVE)


def step_of_record(run: Run) -> Step:
    """The step in the record's last line about all ranks. Errors: ValueError if it has none."""
    line = next((line for line in reversed(run.steps) if line.get("ranks")), None)
    if line is None:
        raise ValueError(f"deeptide doctor: the record of '{run.name}' tells no times: train for more steps")
    busiest = max(line["ranks"], key=lambda rank: float(rank["total"]) - float(rank["waiting"]))
    counted = line.get("counted", {})
    config = json.loads(run.start.get("config", "{}"))
    return Step(
        **{name: float(busiest[name]) for name in _TIMES},
        flops=counted.get("flops", 0.0),
        moved_bytes=counted.get("moved_bytes", 0.0),
        sent_bytes=float(line.get("sent_bytes", 0)),
        ranks=len(line["ranks"]),
        limit=line["limit"],
        dtype="bfloat16" if config.get("bf16", {}).get("enabled") else "float32",
    )


def step_of_pages(pages: list[dict[str, Any]]) -> Step:
    """The step in pages that `deeptide top --json` printed, whose ranks have all told of one."""
    told = [[rank["last_step"] for rank in page["ranks"]] for page in pages]
    ranks = [{name: mean(page[i][key] for page in told) for name, key in _LIVE.items()} for i in range(len(told[0]))]
    busiest = max(range(len(ranks)), key=lambda i: ranks[i]["total"] - ranks[i]["waiting"])
    last = told[-1]
    return Step(
        **ranks[busiest],
        flops=last[busiest]["flops"],
        moved_bytes=last[busiest]["moved_bytes"],
        sent_bytes=last[busiest]["sent_bytes"],
        ranks=max(Counter(rank["host"] for rank in pages[-1]["ranks"]).values()),
        limit=next((step["limit"] for step in last if step["limit"]), ""),
    )


def _is_told(page: dict[str, Any]) -> bool:
    """Every rank has timed a step, and has counted the operators of one."""
    steps = [rank.get("last_step", {}) for rank in page["ranks"]]
    return len(steps) == page["world"] and all(s.get("total_s", 0) > 0 and s.get("moved_bytes", 0) > 0 for s in steps)


def watch(launcher: str, job: str) -> Step:
    """Looks at a live job until it has told enough. Errors: RuntimeError if it ends before, or takes too long."""
    pages: list[dict[str, Any]] = []
    until = time.monotonic() + _LIMIT_S
    words = [launcher, "top", job, "--json", "--every", "0.5"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        try:
            for text in top.stdout:
                page = json.loads(text) if text.startswith("{") else None
                if page and _is_told(page) and (not pages or page["ranks"][0]["step"] > pages[-1]["ranks"][0]["step"]):
                    pages.append(page)
                if len(pages) == _STEPS:
                    return step_of_pages(pages)
                if time.monotonic() > until:
                    break
        finally:
            top.terminate()
    if pages:
        return step_of_pages(pages)
    raise RuntimeError(
        f"deeptide doctor: job {job} told of no step within {_LIMIT_S:g} s: it has ended, waits ('deeptide stacks') or "
        "its steps take longer; let it record itself (deeptide.jsonl_monitor) and name the record"
    )


@contextlib.contextmanager
def paused(job: str | None) -> Iterator[None]:
    """A job's ranks stand still meanwhile, as after ^Z. None: no job."""
    if job is None:
        yield
        return
    os.kill(int(job), signal.SIGTSTP)
    time.sleep(1.0)  # until the launcher has told all ranks
    try:
        yield
    finally:
        os.kill(int(job), signal.SIGCONT)


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}" if value else "-"


def _seconds(value: float) -> str:
    return f"{value:.4f} s" if value else "-"


def ranks_of(hostfile: str) -> tuple[int, int]:
    """(ranks, hosts) of a job on a hostfile's hosts; the launcher checks the file."""
    lines = [line.split("#")[0].strip() for line in Path(hostfile).read_text().splitlines()]
    slots = [int(found[1]) if (found := re.search(r"slots\s*=\s*(\d+)", line)) else 1 for line in lines if line]
    return sum(slots), len(slots)


def table(step: Step, machine: Machine, hosts: int = 1) -> str:
    """One line for each part of the machine."""
    needs_link = step.sent_bytes / machine.link_bytes if machine.link_bytes else 0.0
    drive = f"{_amount(machine.write_bytes, 'B/s')} / {_amount(machine.read_bytes, 'B/s')}"
    operators = step.computing - step.optimizer
    rows = [
        (f"of a step of {step.total:.4f} s", "this machine", "a step has", "which needs", "and takes"),
        (
            "matrix products",
            _amount(machine.flops, "flop/s"),
            _amount(step.flops, "flop"),
            _seconds(step.flops / machine.flops),
            f"{_seconds(operators)} computing",
        ),
        (
            "memory (triad)",
            _amount(machine.memory_bytes, "B/s"),
            _amount(step.moved_bytes, "B"),
            _seconds(step.moved_bytes / machine.memory_bytes),
            f"and {_seconds(step.optimizer)} in the optimizer",
        ),
        (
            f"link between {step.ranks} ranks " + ("here" if hosts == 1 else f"on {hosts} hosts"),
            _amount(machine.link_bytes, "B/s"),
            _amount(step.sent_bytes, "B"),
            _seconds(needs_link),
            f"{_seconds(step.waiting)} waiting for ranks",
        ),
        ("drive, write / read", drive, "", "", f"{_seconds(step.files)} waiting for files"),
        ("between steps", "", "", "", f"{_seconds(step.data)} for data"),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def verdict(step: Step, machine: Machine) -> str:
    """One sentence: what limits a step, and the setting that helps."""
    cause = re.match(r"limited by (\w+)", step.limit)
    kind = cause[1] if cause else ""
    own = step.limit.partition("; of a step's")[0]
    if kind == "network" and machine.link_bytes and step.waiting > _FAR * step.sent_bytes / machine.link_bytes:
        return (
            f"limited by the ranks' turns, not by the link: they wait {step.waiting:.3g} s for each other, and the "
            f"link needs {step.sent_bytes / machine.link_bytes:.3g} s: fewer, larger transfers (reduce_bucket_size, "
            "deeptide.unit_size), more gradient_accumulation_steps, and no other processes on these cores"
        )
    if kind == "files":
        rates = f"{_amount(machine.write_bytes, 'B/s')} written and {_amount(machine.read_bytes, 'B/s')} read"
        return f"{own}; this drive does {rates}"
    if kind in ("waiting", "network", "data"):
        return own
    return _of_computing(step, machine)


def _of_computing(step: Step, machine: Machine) -> str:
    operators = step.computing - step.optimizer
    products, moves = step.flops / machine.flops, step.moved_bytes / machine.memory_bytes
    share = f"{100 * step.computing / step.total:.0f} % of a step" if step.total else "all of a step"
    if step.optimizer > operators:
        return (
            f"limited by memory: the optimizer takes {step.optimizer:.3g} s of the {step.computing:.3g} s of "
            "computing: more gradient_accumulation_steps, a higher stage with more ranks, or deeptide.packed_states"
        )
    if max(products, moves) > 0 and operators > _FAR * max(products, moves):
        return (
            f"limited by what is neither product nor transfer: operators take {operators:.3g} s, {share}, for "
            f"{products:.3g} s of products and {moves:.3g} s of memory: larger micro-batches or engine.compile() for "
            "many small operators; look for other processes on these cores ('deeptide top') and for too few threads"
        )
    if moves > products:
        return (
            f"limited by memory: operators move {_amount(step.moved_bytes, 'B')} in {operators:.3g} s, of which this "
            f"machine needs {moves:.3g} s: larger micro-batches, bf16, fused operators (engine.compile(), deeptide.ops)"
        )
    rate = f"{_amount(step.flops / operators, 'flop/s')} of this machine's {_amount(machine.flops, 'flop/s')}"
    return f"limited by compute: {share} at {rate}: bf16, less recomputation, or more ranks"


def main() -> int:
    parser = argparse.ArgumentParser(prog="deeptide doctor", description=__doc__)
    parser.add_argument("job", help="a live job's id, or the folder of a recorded run")
    parser.add_argument("--launcher", required=True, help="the deeptide command")
    parser.add_argument("--folder", default=".", help="on the drive to measure")
    parser.add_argument("--pause", action="store_true", help="stop a live job while the machine is measured")
    parser.add_argument("--hostfile", help="of the job: its hosts are measured together")
    for name in _OF_HOSTS:
        parser.add_argument(name, help="as of the job, with --hostfile")
    given = parser.parse_args()
    is_live = not Path(given.job).exists()
    try:
        step = watch(given.launcher, given.job) if is_live else step_of_record(Run(given.job))
        where, hosts = ["--num_ranks", str(step.ranks)], 1
        if given.hostfile:
            where = ["--hostfile", given.hostfile]
            ranks, hosts = ranks_of(given.hostfile)
            step = replace(step, ranks=ranks)
        for name in _OF_HOSTS:
            value = vars(given)[name.removeprefix("--")]
            where += [f"{name}={value}"] if value else []
        with paused(given.job if is_live and given.pause else None):
            machine = measure(given.launcher, where, step.dtype, given.folder)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(step, machine, hosts))
    if is_live and not given.pause:
        print("The machine was measured beside the job, which took its share; --pause stops the job meanwhile.")
    print(verdict(step, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
