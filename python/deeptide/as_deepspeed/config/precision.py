# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.precision_config: the sections "fp16" and "bf16" as objects, with DeepSpeed's defaults."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from deeptide.as_deepspeed.config.zero import DeepSpeedConfigModel, invalid


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section "fp16". Errors: ValueError for a loss scale that is no finite number of at least 0."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }
    enabled: bool
    loss_scale: Any

    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(strict, **given)
        text = f"fp16.loss_scale: got {self.loss_scale!r}; it must be a number of at least 0, 0 for a dynamic scale"
        if isinstance(self.loss_scale, bool):
            raise invalid(type(self), text)
        try:
            self.loss_scale = float(self.loss_scale)
        except (TypeError, ValueError):
            raise invalid(type(self), text) from None
        if not math.isfinite(self.loss_scale) or self.loss_scale < 0:
            raise invalid(type(self), text)
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                self._check_count(name, getattr(self, name))

    def _check_count(self, name: str, value: Any) -> None:
        """Errors: of pydantic's, or ConfigError, for what is no whole number above 0."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0 or value != int(value):
            raise invalid(type(self), f"fp16.{name}: got {value!r}, expected an integer above 0 for a dynamic scale")


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section "bf16"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "enabled": False,
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """That of a whole configuration."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """That of a whole configuration; "bfloat16" is its older name."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))
