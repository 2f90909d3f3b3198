# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes of optimizers, from `deeptide.ops`, and its names for what `initialize` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deeptide._optimizer_trial import why_whole
from deeptide.ops._held import HeldOptimizer
from deeptide.ops.adagrad import DeepSpeedCPUAdagrad
from deeptide.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deeptide.ops.lamb import FusedLamb
from deeptide.ops.lion import DeepSpeedCPULion, FusedLion
from deeptide.optimizer import DeeptideOptimizer

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
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
