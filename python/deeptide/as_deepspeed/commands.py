# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the wheel named `deepspeed`, each one of `deeptide`'s: `ds_report` is `deeptide doctor`."""

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
    _become(["--as-deepspeed", *_words(args)])


def report(args: Sequence[str] | None = None) -> NoReturn:
    """Tells what is installed, as ds_report does."""
    _become(["doctor"])


def _words(args: Sequence[str] | None) -> Sequence[str]:
    return sys.argv[1:] if args is None else args


def ssh(args: Sequence[str] | None = None) -> NoReturn:
    """Runs a command on every host, as ds_ssh does."""
    _become(["ssh", *_words(args)])


def bench(args: Sequence[str] | None = None) -> NoReturn:
    """Measures collectives, as ds_bench does; its options are those of `deeptide bench comm`."""
    _become(["bench", "comm", *_words(args)])


def io(args: Sequence[str] | None = None) -> NoReturn:
    """Measures a folder's device, as ds_io does; its options are those of `deeptide bench io`."""
    _become(["bench", "io", *_words(args)])


def elastic(args: Sequence[str] | None = None) -> NoReturn:
    """Prints the batches of an elasticity section, as ds_elastic does."""
    _become(["elastic", *_words(args)])
