# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The loader that initialize returns, as one rank iterates it, and what docs say of where an iteration goes on."""

import deeptide
from actions import subject


class Loader:
    """The oracle's: a position that is saved and loaded, and at most one iteration."""

    def __init__(self, spec, rank, world):
        options = {"batch_size": subject.ROWS, "rank": rank, "world_size": world, "drop_last": spec["drop_last"]}
        self._sampler = deeptide.DistributedSampler(spec["samples"], shuffle=True, seed=0, **options)
        self._world_batch = subject.ROWS * world
        self._epoch, self._batch, self._begun = 0, 0, False
        self._iteration = None  # or {"started", "repeats"}

    def _batches(self):
        """All of the epoch."""
        self._sampler.set_position(self._epoch, 0)
        return list(iter(self._sampler.next, []))

    def draw(self, act):
        """The next samples' numbers; none at an epoch's end."""
        if self._iteration is None or act["anew"]:
            self._iteration = {"started": False, "repeats": act["repeats"]}
        drawn = self._next()
        if not drawn and self._iteration["repeats"]:
            self._iteration["started"] = False
            drawn = self._next()
        if not drawn:
            self._iteration = None
        return drawn

    def _next(self):
        goes_on = self._iteration["started"]
        ended = self._batch >= len(self._batches())
        if not goes_on and (ended or (self._begun and self._batch > 0)):
            self._epoch, self._batch, ended = self._epoch + 1, 0, False
        self._iteration["started"] = self._begun = True
        if ended:
            return []
        self._batch += 1
        return self._batches()[self._batch - 1]

    def position(self):
        return self._epoch, self._batch * self._world_batch

    def go_to(self, epoch, samples):
        self._epoch, self._batch, self._begun = epoch, samples // self._world_batch, False
