# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Two jobs that live at the same time and step by turns: first, second, second, first, and so on."""

import contextlib
import os
from pathlib import Path

import torch.distributed as dist

NAMES = ("old", "new")


class Tokens:
    """The pipes by which two jobs tell each other whose turn it is; made and held by who starts them."""

    def __init__(self, folder):
        for name in NAMES:
            os.mkfifo(Path(folder, name))
        self._ends = {name: os.open(Path(folder, name), os.O_RDWR) for name in NAMES}
        self.give(NAMES[0], 1)

    def give(self, name, turns):
        """Lets a job take as many turns: those that the other, which has ended, would have given it."""
        os.write(self._ends[name], b"." * turns)

    def close(self):
        for end in self._ends.values():
            os.close(end)


class Turns:
    """One rank's view of them. folder: of the pipes; None: the job has no other beside it."""

    def __init__(self, folder, name):
        self._name, self._index = name, 0
        self._alone, self._has_it, self._ends = folder is None, False, None
        if folder and dist.get_rank() == 0:
            self._ends = [os.open(Path(folder, each), os.O_RDWR) for each in (name, *set(NAMES) - {name})]

    @contextlib.contextmanager
    def mine(self):
        """Within it all ranks of this job have begun, and nobody else steps. Collective."""
        if self._ends and not self._has_it:
            os.read(self._ends[0], 1)
        dist.barrier()
        yield
        if self._alone:
            return
        dist.barrier()
        goes_first = NAMES[self._index % 2] == self._name
        self._index += 1
        self._has_it = not goes_first  # who ends a turn begins the next one
        if goes_first and self._ends:
            os.write(self._ends[1], b".")
