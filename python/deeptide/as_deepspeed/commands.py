# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the wheel named `deepspeed`, each one of `deeptide`'s: `ds_report` is `deeptide doctor`.

A command replaces its process. A function that a program calls runs the same in a child, and returns.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

ENVIRONMENT_FILE = ".deepspeed_env"


def _program() -> str | None:
    program = shutil.which("deeptide") or os.path.join(os.path.dirname(sys.executable), "deeptide")
    return program if os.path.exists(program) else None


_MISSING = "the command `deeptide` is not in PATH; it comes with Deeptide's wheel"


def _become(words: list[str]) -> NoReturn:
    program = _program()
    if program is None:
        raise SystemExit(_MISSING)
    os.execv(program, ["deeptide", *words])


def _run(words: list[str]) -> int:
    """Runs the command to its end, and hands on signals meanwhile; returns its exit code."""
    program = _program()
    if program is None:
        raise FileNotFoundError(_MISSING)
    sys.stdout.flush()
    with subprocess.Popen([program, *words]) as child:
        if threading.current_thread() is not threading.main_thread():
            return child.wait()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda received, _: child.send_signal(received))
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(args: Sequence[str] | None = None) -> NoReturn:
    """Starts ranks as `deepspeed` does."""
    _become(["--as-deepspeed", *_words(args)])


class OptionsError(SystemExit, ValueError):
    """Options that do not fit: the command prints what is wrong, and DeepSpeed raises ValueError."""


def main(args: Sequence[str] | None = None) -> None:
    """deepspeed.launcher.runner.main: starts ranks and waits for them. Errors: SystemExit with their exit code."""
    code = _run(["--as-deepspeed", *_words(args)])
    if code:
        raise OptionsError(code) if code == 2 else SystemExit(code)


def report(args: Sequence[str] | None = None) -> NoReturn:
    """Tells what is installed, as ds_report does."""
    _become(["doctor"])


def print_report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """deepspeed.env_report.main: prints what is installed. Nothing that is missing stops the program that asks."""
    try:
        _run(["doctor"])
    except FileNotFoundError as error:
        print(error, flush=True)


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
