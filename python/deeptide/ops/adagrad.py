# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Adagrad under DeepSpeed's name and with its arguments; any device runs the engine's own kernel."""

from __future__ import annotations

from typing import Any

import torch

from deeptide.ops._held import refuse, refuse_other_states

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's CPU Adagrad."""

    deeptide_type = "Adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse(self, "Adagrad has no such variant; leave it out", amsgrad=amsgrad)
        refuse_other_states(self, fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
