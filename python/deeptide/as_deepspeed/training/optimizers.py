# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes of optimizers, from `deeptide.ops`, and its names for what `initialize` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from deeptide._optimizers.trial import why_whole
from deeptide.as_deepspeed import NotSupportedError
from deeptide.ops._held import HeldOptimizer
from deeptide.ops.adagrad import DeepSpeedCPUAdagrad
from deeptide.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deeptide.ops.lamb import FusedLamb
from deeptide.ops.lion import DeepSpeedCPULion, FusedLion
from deeptide.optimizer import DeeptideOptimizer

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "ZeROOptimizer",
    "is_zero_supported_optimizer",
]

# For isinstance: what initialize returns is one of these.
DeepSpeedOptimizer = ZeROOptimizer = DeeptideOptimizer
DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class _Kind(type):
    """The type of a class that initialize's optimizer is an instance of under some configurations; it makes none."""

    def __instancecheck__(cls, instance: object) -> bool:
        engine = instance._engine() if isinstance(instance, DeeptideOptimizer) and instance._engine else None
        return engine is not None and cls.holds(engine)  # type: ignore[attr-defined]

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotSupportedError(
            f"{cls.__name__}(…): deepspeed.initialize makes the optimizer, which keeps masters and the loss scale"
        )


class FP16_Optimizer(metaclass=_Kind):  # noqa: N801
    """For isinstance: fp16 without ZeRO."""

    @staticmethod
    def holds(engine: Any) -> bool:
        """Whether this engine's optimizer is one."""
        return bool(engine.fp16_enabled() and engine.zero_optimization_stage() == 0)


class FP16_UnfusedOptimizer(metaclass=_Kind):  # noqa: N801
    """For isinstance: fp16 without ZeRO, with LAMB."""

    @staticmethod
    def holds(engine: Any) -> bool:
        """Whether this engine's optimizer is one."""
        return FP16_Optimizer.holds(engine) and "lamb" in engine.optimizer_name()


class BF16_Optimizer(metaclass=_Kind):  # noqa: N801
    """For isinstance: bf16 at stages 0 and 1."""

    @staticmethod
    def holds(engine: Any) -> bool:
        """Whether this engine's optimizer is one."""
        return bool(engine.bfloat16_enabled() and engine.zero_optimization_stage() <= 1)


class DeepSpeedZeroOptimizer(metaclass=_Kind):
    """For isinstance: stages 1 and 2."""

    @staticmethod
    def holds(engine: Any) -> bool:
        """Whether this engine's optimizer is one."""
        return engine.zero_optimization_stage() in (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Kind):  # noqa: N801
    """For isinstance: stage 3."""

    @staticmethod
    def holds(engine: Any) -> bool:
        """Whether this engine's optimizer is one."""
        return bool(engine.zero_optimization_stage() == 3)


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether the engine runs it on shards: by a kernel of its own, or as a trial shows."""
    if isinstance(optimizer, HeldOptimizer):
        return True
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    try:
        return not why_whole(optimizer)
    except ValueError:
        return False
