# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""How all benchmarks here report: a page of Markdown, raw figures as JSON."""

import json
import shlex
import sys
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser, name):
    parser.add_argument("--output", type=Path, help="also write the Markdown here")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / f"{name}.json", help="raw figures")


def new_record():
    """The facts that every report says first; take it before the load of the benchmark itself shows."""
    words = ["python", "bench", Path(sys.argv[0]).stem, *sys.argv[1:]]
    return {"command": shlex.join(words), "machine": machine.describe()}


def head(title, record, legend):
    described = [f"- {name}: {value}" for name, value in record["machine"].items()]
    return "\n".join([f"# {title}", "", f"`{record['command']}`", "", *described, "", legend, ""])


def table(header, rows):
    return "\n".join([_line(header), "|" + " --- |" * len(header), *map(_line, rows), ""])


def _line(cells):
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ")[:200] for cell in cells) + " |"


def write(options, text, record):
    print(text)
    for path, content in ((options.output, text), (options.json, json.dumps(record, indent=1))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
