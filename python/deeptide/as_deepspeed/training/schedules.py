# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's five learning-rate schedules as classes, for scripts that make them by hand.

The configuration's own schedules run in the core, by the same formulas; a test compares both.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from deeptide.schedule import ConfigSchedule

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def _per_group(value: Any, count: int, name: str) -> list[float]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values, expected one per param group: {count}")
    return values


def _steps(value: Any, name: str) -> int:
    """The value. Errors: ValueError unless it is a positive integer."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
    return value


def _write_rate(group: dict[str, Any], rate: float) -> None:
    """Into the tensor that a program gave as lr, if it did: it may hold on to it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class _Kind(type):
    """The classes' type: the configuration's schedule, which the core runs, is an instance of the one it names."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (
            isinstance(instance, ConfigSchedule) and instance.name == cls.__name__
        )


class _Schedule(metaclass=_Kind):
    """Counts iterations from -1 and writes each group's lr."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def _write(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            _write_rate(group, rate)
        self._last_lr = rates

    def get_lr(self) -> list[float]:
        """Each group's rate at this iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Each group's rate as it was last written."""
        if self._last_lr is None:
            raise AssertionError("need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on by one iteration, or to the one given."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Its place."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        self.last_batch_iteration = state["last_batch_iteration"]


class WarmupLR(_Schedule):
    """Rises from warmup_min_lr to warmup_max_lr, without it to each group's own lr, then stays."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        count = len(optimizer.param_groups)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(warmup_min_lr, count, "warmup_min_lr")
        self.max_lrs = _per_group(warmup_max_lr, count, "warmup_max_lr")
        self.warmup_num_steps = max(2, _steps(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = warmup_type if warmup_type in ("log", "linear") else "log"
        super().__init__(optimizer, last_batch_iteration)

    def _rise(self) -> float:
        step = self.last_batch_iteration
        if step >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "log":
            return math.log(step + 1) / math.log(self.warmup_num_steps)
        return step / self.warmup_num_steps

    def _gamma(self) -> float:
        return self._rise()

    def get_lr(self) -> list[float]:
        """Each group's rate."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then down to 0 at total_num_steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._rise()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Rises from a share of each group's own lr to all of it, then falls along a cosine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = max(2, _steps(warmup_num_steps, "warmup_num_steps"))
        self.warmup_type = warmup_type if warmup_type in ("log", "linear") else "log"
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """The share of each group's own lr."""
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if step < self.warmup_num_steps:
            log = self.warmup_type == "log"
            rise = math.log(step + 1) / math.log(self.warmup_num_steps) if log else step / self.warmup_num_steps
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * rise
        done = (step - self.warmup_num_steps + 1) / max(1.0, self.total_num_steps - self.warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float]:
        """Each group's rate."""
        return [rate * self.get_lr_ratio() for rate in self.org_lrs]


class LRRangeTest(_Schedule):
    """A rate that grows without end."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = _per_group(lr_range_test_min_lr, len(optimizer.param_groups), "lr_range_test_min_lr")
        self.step_size = _steps(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Each group's rate."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [low * (1 + self.step_rate * interval) for low in self.min_lr]


class OneCycle(_Schedule):
    """Up, down, then a slow decay; with Adam the first beta goes against it. Rates and momenta: one, or one per group.

    Errors: ValueError for a first half without a step, or a list of another length than the groups'.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first = self.first_step_size = cycle_first_step_size
        second = self.second_step_size = first if cycle_second_step_size is None else cycle_second_step_size
        if first <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size, cycle_second_step_size: got {first} and {second}, expected a first half of at "
                "least one step and a second of none or more"
            )
        self.total_size, self.step_ratio = first + second, first / (first + second)
        count = len(optimizer.param_groups)
        self.min_lrs = _per_group(cycle_min_lr, count, "cycle_min_lr")
        self.max_lrs = _per_group(cycle_max_lr, count, "cycle_max_lr")
        self._least = _per_group(cycle_min_mom, count, "cycle_min_mom")
        self._most = _per_group(cycle_max_mom, count, "cycle_max_mom")
        self.decay_lr_rate, self.decay_mom_rate, self.decay_step_size = decay_lr_rate, decay_mom_rate, decay_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            self.first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.cycle_momentum = cycle_momentum and any("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def _scale(self, batch: float) -> float:
        rising = batch <= self.first_step_size
        scale = batch / self.first_step_size if rising else (self.total_size - batch) / self.second_step_size
        stairs = self.first_stair_count if rising else self.second_stair_count
        return math.floor(scale * stairs) / stairs if stairs > 0 else scale

    def _at(self, low: float, high: float, least: float, most: float) -> tuple[float, float]:
        """(rate, momentum) of a group at this iteration."""
        batch = self.last_batch_iteration + 1
        if self.last_batch_iteration < 0:
            return low, least
        if batch < self.total_size:
            scale = self._scale(batch)
            return low + (high - low) * scale, most - (most - least) * scale
        if self.decay_step_size <= 0:
            return low, most
        interval = (batch - self.total_size) / self.decay_step_size
        return low / (1 + self.decay_lr_rate * interval), most * (1 + self.decay_mom_rate * interval)

    def _all(self) -> list[tuple[float, float]]:
        return [self._at(*of_group) for of_group in zip(self.min_lrs, self.max_lrs, self._least, self._most)]

    def get_lr(self) -> list[float]:
        """Each group's rate."""
        return [rate for rate, _ in self._all()]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Each group's betas; None where momentum does not follow the cycle."""
        return [(momentum, 0.99) for _, momentum in self._all()] if self.cycle_momentum else None

    def _write(self, rates: list[float]) -> None:
        super()._write(rates)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or ()):
            if "betas" in group:
                group["betas"] = betas
