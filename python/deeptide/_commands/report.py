# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide report`: writes a page about a run, or two side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deeptide._commands.report_page import make_page
from deeptide._commands.run_record import Run


def write_report(run: str | Path, other: str | Path | None = None, output: str | Path | None = None) -> Path:
    """Writes the page beside the first run's record unless `output` names a file; returns its path."""
    runs = [Run(path) for path in (run, other) if path is not None]
    if len(runs) == 2 and runs[0].name == runs[1].name:
        runs[0].name, runs[1].name = str(run), str(other)
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    page = Path(output) if output is not None else folder / "report.html"
    page.write_text(make_page(runs))
    return page


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="deeptide report",
        description='Writes one HTML page about a run that "deeptide.jsonl_monitor" has recorded, or two side by side.',
    )
    parser.add_argument("run", help="the folder that holds run.jsonl, or that file")
    parser.add_argument("other", nargs="?", help="another run, to be shown beside it")
    parser.add_argument("-o", "--output", help="the page's file; report.html in the run's folder unless given")
    given = parser.parse_args(arguments)
    try:
        page = write_report(given.run, given.other, given.output)
    except (OSError, ValueError) as error:
        print(f"deeptide report: {error}", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
