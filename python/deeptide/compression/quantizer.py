# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Quantizer: rounds parameters in place after a step of an optimizer that is the program's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deeptide._C import ConfigError
from deeptide._process.log import say
from deeptide.compression.quantizers import quantize


class Quantizer:
    """Rounds each matrix that carries start_bits, target_bits and q_period as attributes, and lowers its bits (MoQ)."""

    def __init__(
        self,
        q_groups: int = 1,
        q_mixed_fp16: bool = False,
        q_change_ratio: float = 0.01,
        q_type: str = "symmetric",
        q_rounding: str = "nearest",
        q_verbose: bool = False,
        q_eigenvalue: bool = False,
        use_quantizer_kernel: bool = False,
        layer_num: int = 0,
    ) -> None:
        for name, got, expected in (
            ("q_type", q_type, ("symmetric", "asymmetric")),
            ("q_rounding", q_rounding, ("nearest", "stochastic")),
        ):
            if got not in expected:
                raise ConfigError(f"Quantizer: {name}: got {got!r}, expected one of {', '.join(expected)}")
        self.q_groups, self.q_type, self.q_rounding = q_groups, q_type, q_rounding
        self.q_mixed_fp16, self.q_change_ratio = q_mixed_fp16, q_change_ratio
        self.q_verbose = q_verbose
        self.qsteps = 0
        self.quantize_real_ratio = 1.0

    def any_precision_switch(self) -> bool:
        """Whether eigenvalues may matter in the next step: DeepSpeed says yes always."""
        return True

    def step(self) -> None:
        """Counts a step."""
        self.qsteps += 1

    def update_fp16_ratio(self) -> None:
        """Lowers the share of a mixture that is not rounded."""
        if self.q_mixed_fp16:
            ratio = self.quantize_real_ratio
            self.quantize_real_ratio = ratio - self.q_change_ratio if ratio > 0 else 0.0

    def quantize(
        self,
        parameter_group: Iterable[Iterable[Tensor]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float | None, int]] | None = None,
    ) -> None:
        """After a step: rounds the parameters of all groups. Nothing happens after an overflow without eigenvalues."""
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        for group in parameter_group:
            for parameter in group:
                if parameter.dim() > 1 and getattr(parameter, "start_bits", None):
                    value, layer = (block_eigenvalue or {}).get(id(parameter), (None, 0))
                    factor = 1 if value is None else 1 + math.floor(value * 4)
                    parameter.data = self.compute_quantization(parameter, layer, factor)

    def compute_quantization(self, input: Any, index: int = 0, factor: int = 1) -> Tensor:
        """The values of a parameter, rounded; lowers its bits if it is time."""
        if input.start_bits < input.target_bits:
            raise ConfigError(
                f"Quantizer: a parameter has start_bits {input.start_bits}, below target_bits {input.target_bits}"
            )
        if input.start_bits != input.target_bits and self.qsteps >= input.q_period:
            self.quantize_real_ratio = 1.0
            input.q_period = (input.q_period << 1) * factor
            input.start_bits -= 1
            if self.q_verbose:
                say(f"layer {index} has {input.start_bits} bits after {self.qsteps} steps; period {input.q_period}")
        values: Tensor = input.data
        noise = None
        if self.q_rounding == "stochastic":
            noise = torch.empty_like(values.reshape(self.q_groups, -1)).uniform_(-0.5, 0.5)
        rounded = quantize(values, input.start_bits, self.q_groups, self.q_type == "symmetric", noise)
        if self.q_mixed_fp16:
            rounded = self.quantize_real_ratio * values + (1 - self.quantize_real_ratio) * rounded
        return rounded
