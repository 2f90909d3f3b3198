# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of a pipeline as lists of instructions, and what a step by them takes, on paper."""

from __future__ import annotations

from collections.abc import Sequence

from deeptide import _C
from deeptide._C import PipelineSchedule, SimulatedStep, StageAction, StageCosts, StageInstruction

__all__ = [
    "SCHEDULES",
    "PipelineSchedule",
    "SimulatedStep",
    "StageAction",
    "StageCosts",
    "StageInstruction",
    "instructions",
    "published_idle_time",
    "published_peak_activations",
    "simulate",
]

# By the configuration's parallel.schedule.
SCHEDULES = {
    "1f1b": PipelineSchedule.one_f_one_b,
    "gpipe": PipelineSchedule.gpipe,
    "interleaved": PipelineSchedule.interleaved,
    "zero_bubble": PipelineSchedule.zero_bubble,
}

published_idle_time = _C.published_idle_time
published_peak_activations = _C.published_peak_activations


def instructions(
    schedule: PipelineSchedule, stages: int, micro_batches: int, chunks: int = 1
) -> list[list[StageInstruction]]:
    """Each stage's instructions in one step, in order; `chunks`: of the model on each stage, with `interleaved`."""
    return [_C.stage_instructions(schedule, stages, micro_batches, stage, chunks) for stage in range(max(stages, 1))]


def simulate(
    schedule: PipelineSchedule | Sequence[Sequence[StageInstruction]],
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    costs: StageCosts | None = None,
) -> SimulatedStep:
    """One step on paper: its time, each stage's idle time and peak of live activations.

    `schedule`: a schedule, or lists of instructions of your own, one per stage. Raises ConfigError, naming stages and
    instructions, where such lists deadlock or lack something.
    """
    if isinstance(schedule, PipelineSchedule):
        lists: Sequence[Sequence[StageInstruction]] = instructions(schedule, stages, micro_batches, chunks)
    else:
        lists = schedule
    if len(lists) != stages:
        raise _C.ConfigError(f"a pipeline's schedule: got lists for {len(lists)} stages, expected {stages}")
    return _C.simulate_pipeline(lists, micro_batches, costs or StageCosts(), chunks)
