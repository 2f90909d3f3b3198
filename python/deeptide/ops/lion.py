# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lion under DeepSpeed's names and with its arguments; any device runs the engine's own kernel."""

from __future__ import annotations

from typing import Any

from deeptide.ops._held import HeldOptimizer, refuse_other_states

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class _Lion(HeldOptimizer):
    deeptide_type = "Lion"

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(_Lion):
    """DeepSpeed's FusedLion."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(_Lion):
    """DeepSpeed's CPU Lion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_other_states(self, fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
