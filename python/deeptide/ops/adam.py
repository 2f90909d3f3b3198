# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Adam under DeepSpeed's names and with its arguments; any device runs the engine's own kernel."""

from __future__ import annotations

from typing import Any

import torch

from deeptide.ops._held import refuse, refuse_other_states

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(torch.optim.AdamW):
    """AdamW, or Adam with L2 decay where decoupled=False; `deeptide_type` names it to initialize."""

    deeptide_type = "AdamW"

    def __init__(
        self,
        params: Any,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        weight_decay: float,
        amsgrad: bool,
    ) -> None:
        refuse(self, "take torch.optim.AdamW(amsgrad=True), which the engine steps", amsgrad=amsgrad)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
            group["decoupled_weight_decay"] = decoupled


class FusedAdam(_Adam):
    """DeepSpeed's FusedAdam; adam_w_mode=False is L2 decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdam(_Adam):
    """DeepSpeed's CPU Adam; adamw_mode=False is L2 decay."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_other_states(self, fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
