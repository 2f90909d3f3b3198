# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a program on engines in ranks of their own processes, forked from one that has loaded torch."""

import datetime
import json
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

import torch.distributed as dist  # noqa: E402
from actions.programs import most_ranks  # noqa: E402
from zygote import Zygote  # noqa: E402

import deeptide  # noqa: E402

SLOW = 30  # seconds that an engine waits for a peer
STUCK = 3 * SLOW  # and within which an act ends, with its error if need be: a longer one hangs
_MOST_STUCK = 5  # times as long, all acts together
_CALL = "import sys, json, on_engine; on_engine.main(*json.loads(sys.argv[1]))"


class Run(NamedTuple):
    """results: {setting: [by rank, or None where it did not end]}; hung: ranks that were killed; logs by rank."""

    results: dict
    hung: list
    logs: list


class Runner:
    """Keeps the processes that ranks are forked from, and the store where they meet."""

    def __init__(self, patience=1):
        self._asked_patience = patience
        package = Path(deeptide.__file__).parent.parent
        search = [str(package), str(HERE), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
            "OMP_NUM_THREADS": "1",
        }
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # as in tests/python/conftest.py; ranks inherit it
        # Two: ranks differ in their hashes of strings, as users' do.
        self._zygotes = [Zygote(self._environment) for _ in range(2)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store.set_timeout(datetime.timedelta(seconds=60))

    @property
    def _patience(self):
        """How many times longer ranks may take: on a machine with more to run than processors, as many times."""
        return self._asked_patience * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def run(self, program, settings, limit=None):
        """limit: seconds within which each act ends; a rank of which one does not counts as hanging."""
        limit = limit or self._patience * STUCK
        folder = tempfile.mkdtemp(prefix="deeptide-fuzz-")
        try:
            return self._run(program, settings, folder, limit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run_ranks(self, code, program, size, limit):
        """Calls code with (program, rank, port, folder, limit); returns each rank's output, and what it left."""
        limit *= self._patience
        folder = tempfile.mkdtemp(prefix="deeptide-fuzz-")
        try:
            calls = [[program, number, self._store.port, folder, limit] for number in range(size)]
            _, logs = self._processes(code, calls, limit)
            return logs, [_unpickled(os.path.join(folder, f"rank-{number}")) for number in range(size)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, program, settings, folder, limit):
        size = most_ranks(program)
        for setting in settings:
            os.mkdir(os.path.join(folder, f"{setting}-checkpoints"))
        what, timeout = (json.dumps(program), list(map(str, settings))), self._patience * SLOW
        calls = [[*what, number, self._store.port, folder, limit, timeout] for number in range(size)]
        hung, logs = self._processes(_CALL, calls, limit * _MOST_STUCK)  # ranks end by themselves well before
        return Run({s: [_read(folder, s, r) for r in range(size)] for s in settings}, hung, logs)

    def _processes(self, code, calls, most):
        """(ranks that did not end well, output of each). most: seconds."""
        size = len(calls)
        ranks, logs = [], [None] * size
        for number, call in enumerate(calls):
            ranks.append(self._zygotes[number % 2].start([code, json.dumps(call)], self._environment))
        readers = [
            threading.Thread(target=lambda r=r: logs.__setitem__(r, ranks[r].communicate()), daemon=True)
            for r in range(size)
        ]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + most + 10
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        late = [r for r in range(size) if ranks[r].poll() is None]
        for r in late:
            ranks[r].kill()
        for reader in readers:
            reader.join(10)
        return sorted({*late, *(r for r in range(size) if ranks[r].returncode != 0)}), logs


def _read(folder, setting, number):
    return _unpickled(os.path.join(folder, f"{setting}-{number}"))


def _unpickled(path):
    try:
        with open(path, "rb") as file:
            return pickle.load(file)
    except (FileNotFoundError, EOFError):
        return None
