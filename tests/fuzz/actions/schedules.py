# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch's, and what each makes of the groups' rates.

A schedule is {"kind": step | lambda | onecycle | batches, "made": function | before | by_hand, "gamma": of step,
"sizes" and "method": of batches, by which rates follow the steps' batch sizes}. It is made by a
function that initialize calls; or before that on the program's own optimizer, and given to initialize or not: then the
program steps it.
"""

import torch
from torch.optim import lr_scheduler

from actions import subject
from deeptide.efficiency.variable_batches import lr_scheduler_for_variable_batch_size


def spec_of(program):
    """The program's schedule as a dict, or None. A number is what each step multiplies by."""
    given = program["schedule"]
    return {"kind": "step", "made": "function", "gamma": given} if isinstance(given, float) else given


def make(spec, optimizer):
    if spec["kind"] == "step":
        return lr_scheduler.StepLR(optimizer, 1, spec["gamma"])
    if spec["kind"] == "batches":
        return lr_scheduler_for_variable_batch_size(subject.ROWS, spec["sizes"], None, optimizer, spec["method"])
    if spec["kind"] == "lambda":
        return lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.5 * epoch))
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=500, pct_start=0.02, cycle_momentum=False)


class Rates:
    """Plain torch's: groups are dicts with an lr. Its only state is how often it has stepped."""

    def __init__(self, spec, groups):
        self.spec, self.steps = spec, 0
        self._bases = [group["lr"] for group in groups]
        if spec is not None:
            self._write(groups)

    @property
    def is_by_hand(self):
        return self.spec is not None and self.spec["made"] == "by_hand"

    @property
    def is_closed(self):
        """Whether the rates follow from the number of steps alone."""
        return self.spec is not None and self.spec["kind"] != "step"

    def advance(self, all_groups):
        self.steps += 1
        for groups in all_groups:
            if self.is_closed:
                self._write(groups)
            else:
                for group in groups:
                    group["lr"] *= self.spec["gamma"]

    def _write(self, groups):
        if not self.is_closed:
            return
        if self.spec["kind"] == "batches":
            ratio = self.spec["sizes"][self.steps % len(self.spec["sizes"])] / subject.ROWS
            for group, base in zip(groups, self._bases, strict=True):
                group["lr"] = base * (ratio if self.spec["method"] == "linear" else ratio**0.5)
            return
        stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": base} for base in self._bases])
        schedule = make(self.spec, stand_in)
        for _ in range(self.steps):
            stand_in.step()
            schedule.step()
        for group, moved in zip(groups, stand_in.param_groups, strict=True):
            group["lr"] = moved["lr"]
