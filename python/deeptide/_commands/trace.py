# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide trace`: joins the ranks' timelines into one trace, on one clock, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any


def _read(folder: Path) -> list[dict[str, Any]]:
    """Each rank's trace, by rank. Errors: FileNotFoundError naming what lacks."""
    traces = {}
    for path in folder.glob("trace.rank*.json"):
        trace = json.loads(path.read_text())
        traces[trace["deeptide"]["rank"]] = trace
    if not traces:
        raise FileNotFoundError(
            f"'{folder}' holds no trace.rank*.json: a run leaves them with "
            '"deeptide": {"timeline": {"enabled": true, "output_path": …}}'
        )
    world = next(iter(traces.values()))["deeptide"]["world"]
    if lacking := sorted(set(range(world)) - set(traces)):
        raise FileNotFoundError(f"'{folder}' lacks the timelines of ranks {lacking} of {world}: copy them there")
    return [traces[rank] for rank in sorted(traces)]


def _shift(trace: dict[str, Any], first: dict[str, Any]) -> float:
    """Microseconds to add to a rank's times: ranks leave each exchange of a step at nearly the same moment.

    Ranks of one kernel share its clock and need nothing.
    """
    if trace["deeptide"]["clock"] == first["deeptide"]["clock"]:
        return 0.0
    theirs = dict(first["deeptide"]["exchanges"])
    gaps = [theirs[step] - at for step, at in trace["deeptide"]["exchanges"] if step in theirs]
    return median(gaps) / 1000 if gaps else 0.0


def _step_of(event: dict[str, Any]) -> int | None:
    """None: the event names a rank."""
    step: int | None = event.get("args", {}).get("step")
    return step


def join(folder: str | Path, output: str | Path | None = None) -> Path:
    """Writes folder/trace.json, all ranks from the time 0 on; returns its path.

    Holds the steps that all ranks recorded: in a running job, one may have heard of the request a step earlier.
    """
    traces = _read(Path(folder))
    common = set.intersection(*({_step_of(event) for event in trace["traceEvents"]} for trace in traces))
    events = []
    for trace in traces:
        shift = _shift(trace, traces[0])
        rank = trace["deeptide"]["rank"]
        for event in trace["traceEvents"]:
            if _step_of(event) not in common:
                continue
            if "ts" in event:
                event["ts"] += shift
            if "id" in event:
                event["id"] = f"{rank}.{event['id']}"
            events.append(event)
    begin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    path = Path(output) if output is not None else Path(folder) / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="deeptide trace",
        description='Joins the timelines that the ranks of a run with "deeptide.timeline" have written into one file.',
    )
    parser.add_argument("folder", help="the section's output_path, with the files of all ranks")
    parser.add_argument("-o", "--output", help="the joined file; trace.json in the folder unless given")
    given = parser.parse_args(arguments)
    try:
        path = join(given.folder, given.output)
    except (OSError, ValueError, KeyError) as error:
        print(f"deeptide trace: {error}", file=sys.stderr)
        return 2
    print(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
