# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An optimizer class that holds param groups for an engine, whose kernels step."""

from __future__ import annotations

from typing import Any

import torch

from deeptide._C import ConfigError


class HeldOptimizer(torch.optim.Optimizer):
    """Param groups under the names of the configuration's table; `deeptide_type` names the optimizer there."""

    deeptide_type = ""

    def step(self, closure: Any = None) -> None:  # type: ignore[override, unused-ignore]
        """Not by itself: give it to initialize."""
        raise RuntimeError(f"{type(self).__name__}.step(): give the optimizer to initialize, whose engine steps")


def refuse(optimizer: object, cure: str, unless: object = False, **options: object) -> None:
    """Errors: ConfigError naming the first option that is not `unless`."""
    for name, value in options.items():
        if value != unless:
            raise ConfigError(f"{type(optimizer).__name__}: {name}={value!r} is not supported; {cure}")


def refuse_other_states(optimizer: object, fp32_optimizer_states: bool) -> None:
    """Errors: ConfigError if states are asked for in another type than fp32."""
    cure = "bf16_optimizer_states of the configuration sets the type; leave it out"
    refuse(optimizer, cure, True, fp32_optimizer_states=fp32_optimizer_states)
