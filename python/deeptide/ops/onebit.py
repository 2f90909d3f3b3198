# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam, 1-bit LAMB and 0/1 Adam under DeepSpeed's names and with its arguments; the engine's kernels step."""

from __future__ import annotations

from typing import Any

from deeptide.ops._held import HeldOptimizer, refuse

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]


class _OneBit(HeldOptimizer):
    """Takes what the three have in common; `options` are an optimizer's own."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        others: dict[str, Any],
        **options: Any,
    ) -> None:
        amsgrad, max_grad_norm = others.pop("amsgrad", False), others.pop("max_grad_norm", 0.0)
        inside = others.pop("eps_inside_sqrt", False)
        refuse(self, "the optimizer has no such variant; leave it out", amsgrad=amsgrad, eps_inside_sqrt=inside)
        refuse(self, 'set "gradient_clipping" in the configuration', max_grad_norm=max_grad_norm)
        for name in others:
            if name not in ("bias_correction", "deepspeed", "cuda_aware", "comm_backend_name"):
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument '{name}'")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})


class OnebitAdam(_OneBit):
    """After `freeze_step` steps of Adam, ranks exchange signs of the momentum. As in DeepSpeed, no bias correction."""

    deeptide_type = "OneBitAdam"

    def __init__(
        self,
        params: Any,
        deepspeed: object = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, others, freeze_step=freeze_step)


class OnebitLamb(_OneBit):
    """The same of LAMB."""

    deeptide_type = "OneBitLamb"

    def __init__(
        self,
        params: Any,
        deepspeed: object = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **others: Any,
    ) -> None:
        options = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        options |= {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        super().__init__(params, lr, betas, eps, weight_decay, others, freeze_step=freeze_step, **options)


class ZeroOneAdam(_OneBit):
    """0/1 Adam, whose ranks exchange at each step: local_step_clipper is 1, where DeepSpeed's is 16."""

    deeptide_type = "ZeroOneAdam"

    def __init__(
        self,
        params: Any,
        deepspeed: object = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 1,
        **others: Any,
    ) -> None:
        refuse(self, "ranks exchange at every step", 1, local_step_clipper=local_step_clipper)
        options = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        super().__init__(params, lr, betas, eps, weight_decay, others, **options)
