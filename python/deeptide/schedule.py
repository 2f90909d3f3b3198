# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: a view of the configuration's, and the care of a caller's own."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from deeptide._C import Config, ConfigError

if TYPE_CHECKING:
    from deeptide.engine import Engine
    from deeptide.optimizer import DeeptideOptimizer


class ConfigSchedule:
    """The configuration's schedule as the core runs it; one iteration each applied step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: weakref.ref[Engine] | None = None

    def attach(self, engine: Engine) -> None:
        """The engine that runs it, weakly."""
        self._engine = weakref.ref(engine)

    def _live_engine(self) -> Engine:
        engine = self._engine() if self._engine is not None else None
        if engine is None:
            raise RuntimeError("this schedule's engine is gone; keep the engine that deeptide.initialize returned")
        return engine

    def step(self, *args: object, **kwargs: object) -> None:
        """Does nothing: engine.step() moves the schedule when, and only when, it applies a step."""

    def get_last_lr(self) -> list[float]:
        """Each group's learning rate."""
        return self._live_engine().get_lr()

    get_lr = get_last_lr

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Each group's two betas, or its momentum, which OneCycle moves."""
        return self._live_engine().get_mom()

    def state_dict(self) -> dict[str, int]:
        """Its one number; -1 before the first step."""
        engine = self._live_engine()
        return {"last_batch_iteration": engine.global_steps - engine.skipped_steps - 1}

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Not here: the core keeps the schedule's place in its checkpoint."""
        raise RuntimeError(f"{self.name} is saved and restored by engine.save_checkpoint and engine.load_checkpoint")


def resolve_schedule(lr_scheduler: Any, optimizer: DeeptideOptimizer | None, config: Config) -> Any:
    """Returns the schedule that `initialize` returns: the caller's, the configuration's, or None.

    lr_scheduler: an instance, or a function of the optimizer.
    """
    if lr_scheduler is None:
        return ConfigSchedule(config.scheduler.type) if config.scheduler.type and optimizer is not None else None
    if optimizer is None:
        raise ConfigError('lr_scheduler was given, but there is no optimizer; add the "optimizer" section or give one')
    if not hasattr(lr_scheduler, "step"):
        if not callable(lr_scheduler):
            raise ConfigError(
                f"lr_scheduler: got {type(lr_scheduler).__name__}, expected a scheduler with step() "
                "or a function that makes one from the optimizer"
            )
        lr_scheduler = lr_scheduler(optimizer)
    bound = getattr(lr_scheduler, "optimizer", None)
    if bound is not None and bound.param_groups is not optimizer.param_groups:
        raise ConfigError(
            "lr_scheduler is bound to another optimizer, so its learning rates would have no effect; "
            "make it on the optimizer given to deeptide.initialize, or give a function: lambda optimizer: ..."
        )
    return lr_scheduler


def _is_client(schedule: object) -> bool:
    return schedule is not None and not isinstance(schedule, ConfigSchedule)


def _signature(schedule: Any) -> inspect.Signature | None:
    """The signature of its step(); None where there is none to be had."""
    try:
        return inspect.signature(schedule.step)
    except (TypeError, ValueError):
        return None


def check_arguments(schedule: Any, lr_kwargs: dict[str, Any] | None) -> None:
    """Called before a step: the schedule follows after it. Errors: ConfigError on what its step() does not take."""
    if not lr_kwargs or not _is_client(schedule) or (signature := _signature(schedule)) is None:
        return
    try:
        signature.bind(**lr_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"engine.step: got lr_kwargs with {', '.join(map(repr, lr_kwargs))}, expected arguments of "
            f"{type(schedule).__name__}.step{signature}: {error}. No step was taken"
        ) from error


def _missing(schedule: Any) -> list[str]:
    """The arguments that its step() cannot do without."""
    signature = _signature(schedule)
    if signature is None:
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in variable]


def advance(schedule: Any, lr_kwargs: dict[str, Any] | None) -> str:
    """One step of a caller's schedule, after a step of the engine was applied.

    A schedule that wants an argument, such as ReduceLROnPlateau its metric, is left alone without. Returns what to tell
    the user about that; empty when it has stepped.
    """
    if not _is_client(schedule):
        return ""
    if not lr_kwargs and (names := _missing(schedule)):
        given = ", ".join(f'"{name}": …' for name in names)
        return (
            f"{type(schedule).__name__} does not follow a step without {', '.join(names)}: give what it is to see, the "
            f"same on all ranks, by engine.step(lr_kwargs={{{given}}}), or call its step() yourself"
        )
    bound = getattr(schedule, "optimizer", None)
    if bound is not None:
        bound._opt_called = True  # torch warns when a scheduler steps before its own optimizer object
    schedule.step(**(lr_kwargs or {}))
    return ""
