# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""LAMB under DeepSpeed's name and with its arguments; any device runs the engine's own kernel."""

from __future__ import annotations

from typing import Any

from deeptide.ops._held import HeldOptimizer, refuse

__all__ = ["FusedLamb"]


class FusedLamb(HeldOptimizer):
    """DeepSpeed's FusedLamb."""

    deeptide_type = "Lamb"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refuse(self, "LAMB has no such variant; leave it out", amsgrad=amsgrad)
        refuse(self, 'set "gradient_clipping" in the configuration', max_grad_norm=max_grad_norm)
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        options |= {"eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay}
        super().__init__(params, {**options, "max_coeff": max_coeff, "min_coeff": min_coeff})
