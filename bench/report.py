# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the jobs' raw figures into Markdown tables."""

from statistics import median

import output

HEADER = (
    "contender", "allocator", "step, best (s)", "step, median (s)", "x floor", "x torch", "x DDP", "x DDP tuned",
    "job peak (MiB)", "peak RSS, set-up (MiB)", "peak RSS, steps (MiB)", "PSS (MiB)", "set-up (s)", "loss",
)  # fmt: skip
LEGEND = """\
Step: a round's figure is the median over its steps of the slower rank's time; shown are the best and the median round.
Ratios are taken within a round, then their median: to the floor, to plain torch (one model a rank, no communication)
and to DDP, all with glibc's default allocator, and to DDP with the tuned one. Job peak: what all ranks took together in
the timed steps, shared pages counted once. RSS and PSS are the larger rank's: peak until the warm-up ended, peak in the
timed steps, and what was held at the end with shared pages divided by their users. Set-up: the median round's time from
the model in plain torch to the first step. Loss: mean over the ranks at the last step."""

APART = ("floor", "torch")  # the first updates nothing, the second trains each rank's data alone


def round_seconds(job):
    """The median over the steps of the slower rank's time."""
    return median(max(times) for times in zip(*(rank["step_seconds"] for rank in job["ranks"]), strict=True))


def final_loss(job):
    losses = [rank["losses"][-1] for rank in job["ranks"]]
    return sum(losses) / len(losses)


def _seconds_by_round(jobs):
    return {job["round"]: round_seconds(job) for job in jobs if "ranks" in job}


def _ratio(jobs, reference):
    mine, theirs = _seconds_by_round(jobs), _seconds_by_round(reference)
    ratios = [mine[number] / theirs[number] for number in mine if number in theirs]
    return f"{median(ratios):.3f}" if ratios else ""


def setup_seconds(job):
    return max(rank["setup_seconds"] for rank in job["ranks"])


def _largest_mib(jobs, field):
    return f"{max(rank[field] for job in jobs for rank in job['ranks']) / 2**20:.0f}"


def _row(key, groups):
    contender, allocator = key
    jobs = groups[key]
    done = [job for job in jobs if "ranks" in job]
    lost = [f"round {job['round']}: {job.get('skipped') or job.get('error')}" for job in jobs if "ranks" not in job]
    if not done:
        words = "skipped" if "skipped" in jobs[0] else "failed"
        return [contender, allocator, f"{words}: {lost[0].partition(': ')[2]}"] + [""] * (len(HEADER) - 3), []
    seconds = _seconds_by_round(done).values()
    references = (("floor", "default"), ("torch", "default"), ("ddp", "default"), ("ddp", "tuned"))
    return [
        contender,
        allocator,
        f"{min(seconds):#.4g}",
        f"{median(seconds):#.4g}",
        *(_ratio(done, groups.get(reference, [])) for reference in references),
        f"{max(job['job_peak'] for job in done) / 2**20:.0f}",
        *(_largest_mib(done, field) for field in ("setup_peak_rss", "step_peak_rss", "pss")),
        f"{median(map(setup_seconds, done)):.2f}",
        f"{final_loss(done[-1]):.4f}",
    ], [f"{contender} ({allocator}), {words}" for words in lost]


def _agreement(jobs):
    """How far apart the contenders' last losses are."""
    losses = {(job["contender"], final_loss(job)) for job in jobs if "ranks" in job and job["contender"] not in APART}
    if len(losses) < 2:
        return ""
    low, high = min(losses, key=lambda pair: pair[1]), max(losses, key=lambda pair: pair[1])
    return f"Last losses lie within {high[1] - low[1]:.1e}: {low[1]:.6f} ({low[0]}) to {high[1]:.6f} ({high[0]})."


def _section(precision, jobs):
    groups = {}
    for job in jobs:
        groups.setdefault((job["contender"], job["allocator"]), []).append(job)
    rows, notes = zip(*(_row(key, groups) for key in groups), strict=True)
    lines = [f"## {precision}", "", output.table(HEADER, rows)]
    lines += [f"- Failed in part: {note}" for several in notes for note in several]
    return "\n".join([*lines, _agreement(jobs), ""])


def _gain(jobs):
    """The share that bf16 saves each contender, round by round."""
    groups = {}
    for job in jobs:
        by_precision = groups.setdefault((job["contender"], job["allocator"]), {"bf16": [], "fp32": []})
        by_precision[job["precision"]].append(job)
    rows = [(*key, _ratio(of["bf16"], of["fp32"])) for key, of in groups.items()]
    return "\n".join(["## bf16 against fp32", "", output.table(("contender", "allocator", "bf16 / fp32"), rows)])


def markdown(record):
    parts = [output.head("Benchmark", record, LEGEND)]
    precisions = list(dict.fromkeys(job["precision"] for job in record["jobs"]))
    parts.extend(
        _section(precision, [job for job in record["jobs"] if job["precision"] == precision])
        for precision in precisions
    )
    if len(precisions) > 1:
        parts.append(_gain(record["jobs"]))
    return "\n".join(parts)
