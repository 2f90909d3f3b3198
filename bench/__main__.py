# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark by its name, whatever room it lies in: `python bench gpu --model tiny`."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def scripts():
    """Path by name."""
    found = sorted(HERE.glob("*/*.py"))
    return {path.stem: path for path in found if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}


def main():
    known, name = scripts(), "".join(sys.argv[1:2])
    if name not in known:
        names = ", ".join(each for each in known if not each.endswith("worker"))
        sys.exit(f"python bench NAME …: got '{name}', expected one of {names}")
    sys.path.insert(0, str(HERE))  # modules name each other from here, in ranks that the launcher starts as well
    sys.argv[:2] = [str(known[name])]
    runpy.run_path(str(known[name]), run_name="__main__")


if __name__ == "__main__":
    main()
