# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that live at the same time and step by turns: first to last, last to first, and so on."""

import contextlib
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from jobs import free_ports


def run_by_turns(names, run):
    """By name what run(name, words, settings) returns, a job's outcome, all at once in threads of their own.

    words: of the job's command line, for its Turns. settings: of run_ranks: a port, and what stops the job when another
    has failed, which it would wait for.
    """
    stopped, ports = threading.Event(), dict(zip(names, free_ports(len(names)), strict=True))

    def run_one(name):
        words = ["--turns", folder, "--names", *names, "--name", name]
        outcome = run(name, words, {"port": ports[name], "stopped": stopped})
        if "ranks" not in outcome:
            stopped.set()
        return outcome

    with tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder, ThreadPoolExecutor(len(names)) as pool:
        pipes = []
        for place, _ in enumerate(names):
            os.mkfifo(Path(folder, str(place)))
            pipes.append(os.open(Path(folder, str(place)), os.O_RDWR))  # held, so that no job finds none at the end
        os.write(pipes[0], b".")
        try:
            return dict(zip(names, pool.map(run_one, names), strict=True))
        finally:
            for pipe in pipes:
                os.close(pipe)


def add_arguments(parser):
    parser.add_argument("--turns", type=Path, help="folder of the pipes of jobs beside this one")
    parser.add_argument("--names", nargs="+", help="of all of them, in order")
    parser.add_argument("--name", help="this job's")


class Turns:
    """One rank's view of them. options: of add_arguments; without a folder the job has no others beside it."""

    def __init__(self, options):
        self._has_it, self._round, self._pipes = False, 0, None
        self._alone = options.turns is None
        if not self._alone:
            self._place, count = options.names.index(options.name), len(options.names)
            if dist.get_rank() == 0:
                self._pipes = [os.open(Path(options.turns, str(place)), os.O_RDWR) for place in range(count)]

    @contextlib.contextmanager
    def mine(self):
        """Within it all ranks of this job have begun, and nobody else steps. Collective."""
        if self._pipes and not self._has_it:
            os.read(self._pipes[self._place], 1)
        dist.barrier()
        yield
        if self._alone:
            return
        dist.barrier()
        if self._pipes:
            after = self._place + (1 if self._round % 2 == 0 else -1)
            self._has_it = not 0 <= after < len(self._pipes)  # who ends a round begins the next one
            if not self._has_it:
                os.write(self._pipes[after], b".")
        self._round += 1
