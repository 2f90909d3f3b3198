# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The commands `deepspeed` and `ds_report` of the wheel: `deeptide --as-deepspeed` and `deeptide doctor`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

ENVIRONMENT_FILE = ".deepspeed_env"


def _become(words: list[str]) -> NoReturn:
    program = shutil.which("deeptide") or os.path.join(os.path.dirname(sys.executable), "deeptide")
    if not os.path.exists(program):
        raise SystemExit("the command `deeptide` is not in PATH; it comes with Deeptide's wheel")
    os.execv(program, ["deeptide", *words])


def launch(args: Sequence[str] | None = None) -> NoReturn:
    """Starts ranks as `deepspeed` does."""
    _become(["--as-deepspeed", *(sys.argv[1:] if args is None else args)])


def report(args: Sequence[str] | None = None) -> NoReturn:
    """Tells what is installed, as ds_report does."""
    _become(["doctor"])
