# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stop-watches that wait for the device, and samples per second: deepspeed.utils.timer names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from deeptide._process.log import say
from deeptide.accelerator import get_accelerator

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TIME_EPSILON = 1e-6


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def _says(ranks: Iterable[int] | None) -> bool:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ranks is None or rank in ranks


class SynchronizedWallClockTimer:
    """Named timers: timers("forward").start()."""

    class Timer:
        """One of them; times are in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self.records: list[float] = []
            self._begun = self._elapsed = 0.0

        def start(self) -> None:
            """Begins. Errors: RuntimeError if it runs."""
            if self.started_:
                raise RuntimeError(f"timer '{self.name_}' has been started already")
            self._begun, self.started_ = _now(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Ends; adds up unless `reset`, and keeps the time for `mean` if `record`. Errors: RuntimeError."""
            if not self.started_:
                raise RuntimeError(f"timer '{self.name_}' is not started")
            passed = 1000.0 * (_now() - self._begun)
            self._elapsed = passed if reset else self._elapsed + passed
            if record:
                self.records.append(passed)
            self.started_ = False

        def add(self, milliseconds: float) -> None:
            """Adds a time that somebody else has measured."""
            self._elapsed += milliseconds
            self.records.append(milliseconds)

        def reset(self) -> None:
            """Forgets everything."""
            self.started_, self._elapsed, self.records = False, 0.0, []

        def elapsed(self, reset: bool = True) -> float:
            """The time so far; a running timer goes on."""
            running = self.started_
            if running:
                self.stop()
            passed = self._elapsed
            if reset:
                self.reset()
            if running:
                self.start()
            return passed

        def mean(self) -> float:
            """The mean of what was recorded, without the largest and smallest tenths."""
            return trim_mean(self.records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        """All, by name."""
        return self.timers

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        """The timer of that name, made if there is none."""
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """The memory that the device has in use, in GiB."""
        accelerator, gib = get_accelerator(), 1 << 30
        in_use, most = accelerator.memory_allocated() / gib, accelerator.max_memory_allocated() / gib
        return f" | mem_allocated: {in_use:.4f} GB | max_mem_allocated: {most:.4f} GB"

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Writes a line of the named timers' times over `normalizer`, on `ranks`; None: on rank 0."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        if parts and _says((0,) if ranks is None else ranks):
            say("time (ms) | " + " | ".join(parts) + (self.memory_usage() if memory_breakdown else ""))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Each named timer's mean over `normalizer`."""
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


class NoopTimer:
    """Takes the same calls and measures nothing."""

    class Timer:
        """One of them."""

        def start(self, **_: Any) -> None:
            """Nothing."""

        stop = reset = start

        def elapsed(self, **_: Any) -> float:
            """0."""
            return 0.0

        mean = elapsed

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        """The one timer."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None."""
        return {}

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def get_mean(self, *_: Any, **__: Any) -> dict[str, float]:
        """Nothing."""
        return {}


class ThroughputTimer:
    """Samples per second of steps, but the first `start_step`; says them every `steps_per_output` steps."""

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        self.enabled = bool(getattr(config, "enabled", True))
        self.batch_size = batch_size or 1
        self.start_step, self.steps_per_output, self.monitor_memory = start_step, steps_per_output, monitor_memory
        self.logging = logging_fn or say
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started = False
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """Another epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Before a micro-batch."""
        self.started = self.enabled
        self._begun = _now() if self.enabled and self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """After it; `global_step`: it ended a step."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if self._begun is None:
            return
        passed = _now() - self._begun
        self.total_elapsed_time += passed
        self.step_elapsed_time += passed
        if not global_step:
            return
        every = self.steps_per_output
        if report_speed and every and self.global_step_count % every == 0:
            speed = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
            memory = SynchronizedWallClockTimer.memory_usage() if self.monitor_memory else ""
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={speed}{memory}"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Over all measured steps; minus infinity before the first."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if steps > 0 and self.total_elapsed_time
            else -float("inf")
        )


def trim_mean(data: list[float], trim_percent: float) -> float:
    """The mean without the largest and the smallest share of values; 0 of none."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_percent: got {trim_percent}, expected 0 to 1")
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : max(len(data) - cut, cut + 1)]
    return sum(kept) / len(kept) if kept else 0.0
