# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the engine: `python tests/fuzz --seconds 120`, or `--seed 7`, or `--program file.json` to run one again."""

import argparse
import json
import sys
from pathlib import Path

import campaign
import pipelines
from actions.programs import settings_of
from drawn import trial


def main():
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow")
    parser.add_argument("--programs", type=int, default=10**9, help="at most so many")
    parser.add_argument(
        "--settings", type=int, default=4, help="of the 8 settings (stage, memory), how many per program"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=1, help="how many times longer ranks may take, on a busy machine"
    )
    parser.add_argument(
        "--shrink", type=float, help="seconds to shrink a failing program; default: 60, and 0 with --program"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first failing program")
    parser.add_argument("--all", action="store_true", help="print each failing program, not one of each kind")
    parser.add_argument("--pipelines", action="store_true", help="only programs of pipelines")
    parser.add_argument("--models", action="store_true", help="only programs of drawn models, of all their traits")
    parser.add_argument("--having", nargs="*", default=[], help="of these, programs with all these traits or idioms")
    parser.add_argument("--refusals", action="store_true", help="of these, a named error is a finding too")
    where = {"dest": "on_accelerator", "action": "store_const", "default": None}
    parser.add_argument("--accelerators", **where, const=True, help="only programs on the simulated accelerator")
    parser.add_argument("--cpus", **where, const=False, help="no such programs")
    parser.add_argument("--program", type=Path, help="run this program at all settings")
    options = parser.parse_args()
    if not options.program:
        sys.exit(0 if campaign.Campaign(options).run() else 1)
    campaign.start(options.patience)
    program = json.loads(options.program.read_text())
    if options.pipelines:
        mismatch = pipelines.try_program(campaign._runner, program)
        print(mismatch[1] if mismatch else "as the uncut model")
        sys.exit(1 if mismatch else 0)
    if options.models:
        mismatch = trial.try_program(campaign._runner, program, options.shrink or 0, options.refusals)
        print(mismatch[1] if mismatch else "as plain torch")
        sys.exit(1 if mismatch else 0)
    mismatch = campaign.try_program(program, settings_of(program), options.shrink or 0, avoid=False)
    print(mismatch[1] if mismatch else "as plain torch")
    sys.exit(1 if mismatch else 0)


if __name__ == "__main__":
    main()
