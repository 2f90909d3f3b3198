# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Observes an engine's steps: monitors, timers, the flops profiler. Nothing here changes a number."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from deeptide import _C
from deeptide._C import Config
from deeptide.timers import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    STEP_GLOBAL_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeptide.flops_profiler import FlopsProfiler


def tokens_in(values: Iterable[Any]) -> int:
    """Elements of the first tensor of integers in rows, as tokens come; 0 without one."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return value.numel()
    return 0


def _is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())


class Observed:
    """The part of an engine that observes."""

    module: torch.nn.Module
    world: _C.World
    _core: _C.Engine
    _config: Config

    def _begin_to_observe(self) -> None:
        from deeptide.monitor import MonitorMaster  # here, because `import deeptide` is to take little time

        self.monitor = MonitorMaster(self._config, self.world.rank)
        times = self._config.wall_clock_breakdown
        self.timers: SynchronizedWallClockTimer | NoopTimer = SynchronizedWallClockTimer() if times else NoopTimer()
        self.flops_profiler: FlopsProfiler | None = None
        if self.monitor.observes():
            self._core.keep_events()  # on every rank, which tells its loss to the first
        if self._config.flops_profiler.enabled:
            from deeptide.flops_profiler import FlopsProfiler  # likewise

            self._core.leave_profile_to_program()
            factor = self._config.flops_profiler.recompute_fwd_factor
            self.flops_profiler = FlopsProfiler(self.module, self, factor)

    def _observed_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[object]:
        if self.module.training and torch.is_grad_enabled():
            self._begin_forward(args, kwargs)
        return record_function("deeptide::forward") if _is_profiled() else contextlib.nullcontext()

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._core.begin_forward(tokens_in((*args, *kwargs.values())))
        profiler = self.flops_profiler
        if profiler is None or profiler.started or self.world.rank != 0:
            return
        if self._core.global_steps() + 1 == max(self._config.flops_profiler.profile_step, 1):
            profiler.start_profile()

    def _observed_backward(self) -> contextlib.AbstractContextManager[None]:
        profiler = self.flops_profiler
        return profiler.backward() if profiler is not None and profiler.started else contextlib.nullcontext()

    def _observe_step(self) -> None:
        """After a step of the optimizer."""
        if self.monitor.observes():
            self.monitor.take_from(self._core)
        if isinstance(self.timers, SynchronizedWallClockTimer):
            times = self._core.step_times()
            for name, seconds in (
                (FORWARD_GLOBAL_TIMER, times.forward),
                (BACKWARD_GLOBAL_TIMER, times.backward),
                (BACKWARD_INNER_GLOBAL_TIMER, times.backward - times.backward_waiting),
                (BACKWARD_REDUCE_GLOBAL_TIMER, times.backward_waiting),
                (STEP_GLOBAL_TIMER, times.step),
            ):
                self.timers(name).add(1e3 * seconds)
        if self.flops_profiler is not None and self.flops_profiler.started:
            self._end_profile(self.flops_profiler)

    def _end_profile(self, profiler: FlopsProfiler) -> None:
        wanted = self._config.flops_profiler
        profiler.stop_profile()
        step = profiler.duration - profiler.backward_s - float(profiler.get_total_duration())
        profiler.print_model_profile(
            self._core.global_steps(),
            wanted.module_depth,
            wanted.top_modules,
            wanted.detailed,
            wanted.output_file,
            step_latency=max(step, 0.0),
            bwd_latency=profiler.backward_s,
        )

    def limit(self) -> str:
        """One line that names what limited the steps since the last line, with figures and a setting that would help.

        Empty without "wall_clock_breakdown" or "deeptide.jsonl_monitor", on ranks other than 0 and before step 3.
        """
        return self._core.limit()

    def comms_summary(self) -> str:
        """A table of the engine's collectives, with "comms_logger": bytes, latency, bandwidth, and who waits."""
        return self._core.collectives_text()
