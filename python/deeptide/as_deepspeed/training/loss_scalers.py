# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.fp16.loss_scaler: scales by themselves, for loops of a program's own. The engine has its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from deeptide.as_deepspeed import NotSupportedError

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


def to_python_float(t: Any) -> float:
    """A tensor of one element, or a number, as a float."""
    return float(t)


class LossScalerBase:
    """A factor for the loss before backward."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """The factor in force."""
        return self.cur_scale

    def scale_gradient(self, module: object, grad_in: Iterable[torch.Tensor], grad_out: object) -> tuple[Any, ...]:
        """Each gradient times the factor."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """A fixed factor stays."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor."""
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Autograd from the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A fixed factor."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: object) -> bool:
        """Never looks."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A factor that halves when gradients overflow and doubles after `scale_window` steps without.

    The first `delayed_shift` - 1 overflows leave it. Errors: RuntimeError on an overflow at `min_scale`.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale, self.dtype = raise_error_at_min_scale, dtype

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient on this rank is not finite."""
        return any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """After a step, or after one that was left out."""
        if overflow:
            self._lower()
            self.last_overflow_iter = self.cur_iter
        else:
            steady = self.cur_iter - self.last_overflow_iter - 1
            raises = steady > 0 and steady % self.scale_window == 0
            if self.consecutive_hysteresis or raises:
                self.cur_hysteresis = self.delayed_shift
            if raises:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _lower(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise RuntimeError(
                f"gradients overflow at the smallest loss scale, {self.min_scale:g}: look for the operator that makes "
                "them, or train in bf16"
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)


def CreateLossScaler(  # noqa: N802
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    """Dynamic or fixed for fp16; 1 for other types."""
    if dtype != torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise ValueError("CreateLossScaler: dynamic_loss_args is None, expected the arguments of DynamicLossScaler")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


class EngineLossScale(DynamicLossScaler):
    """An engine's own scale, to read: what optimizer.loss_scaler and optimizer.loss_scale_config are."""

    def __init__(self, engine: Any) -> None:
        given = engine.given_config.get("fp16") or {}
        self._engine = weakref.ref(engine)
        self.dynamic = self.dynamic_loss_scale = engine.dynamic_loss_scale()
        self.scale_factor, self.scale_window = 2.0, int(given.get("loss_scale_window", 1000))
        self.min_scale = self.min_loss_scale = given.get("min_loss_scale", 1)
        self.delayed_shift = int(given.get("hysteresis", 2))
        self.consecutive_hysteresis = bool(given.get("consecutive_hysteresis", False))
        self.dtype = torch.half

    def _live(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("this loss scale's engine is gone; keep what deepspeed.initialize returned")
        return engine

    @property
    def cur_scale(self) -> float:  # type: ignore[override]
        """The factor in force."""
        return float(self._live().cur_scale)

    @property
    def cur_iter(self) -> int:  # type: ignore[override]
        """Steps so far, those left out included."""
        return int(self._live().global_steps)

    def update_scale(self, overflow: bool) -> None:
        """Not here: engine.step() does it."""
        raise NotSupportedError("the engine's loss scale follows its own steps; update_scale() cannot be called on it")
