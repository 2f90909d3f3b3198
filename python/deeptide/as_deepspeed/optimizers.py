# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes of optimizers: torch's own, with DeepSpeed's arguments; the engine runs its kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deeptide._C import ConfigError
from deeptide.optimizer import DeeptideOptimizer

# For isinstance: what initialize returns is one of these.
DeepSpeedOptimizer = ZeROOptimizer = DeeptideOptimizer
DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


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
        if amsgrad:
            raise ConfigError(f"{type(self).__name__}: amsgrad=True is not supported; leave it out")
        if not bias_correction:
            raise ConfigError(
                f"{type(self).__name__}: bias_correction=False is not supported in a class; "
                'write it into the configuration: "optimizer": {"type": "AdamW", "params": {"bias_correction": false}}'
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
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
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


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
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class _Lion(torch.optim.Optimizer):
    """Holds param groups for the engine; has no step of its own."""

    deeptide_type = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override, unused-ignore]
        """Not by itself: give it to deepspeed.initialize."""
        raise RuntimeError(
            f"{type(self).__name__}.step(): give the optimizer to deepspeed.initialize, whose engine steps"
        )


class FusedLion(_Lion):
    """DeepSpeed's FusedLion."""


class DeepSpeedCPULion(_Lion):
    """DeepSpeed's CPU Lion."""


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether the engine runs it."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, _Lion))
