# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""When a model's techniques begin, and how the bits of its weights fall: by optimizer steps that were applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deeptide._C import ConfigError
from deeptide._process.log import say
from deeptide.compression.eigenvalue import Eigenvalue
from deeptide.compression.layers import CompressedLayer, compressed_layers
from deeptide.compression.section import read_older, read_section
from deeptide.compression.techniques import WeightQuantization
from deeptide.config import ConfigSource, load_config


class FallingBits:
    """Bits that fall in the optimizer's steps (MoQ): one after each period, which doubles then.

    DeepSpeed's order: it rounds after a step and before it looks whether the technique has begun, so weights are
    rounded from the step after schedule_offset on; with 0, from the first forward on.
    """

    def __init__(self, layers: list[WeightQuantization], shared: dict[str, Any]) -> None:
        mixture = shared["fp16_mixed_quantize"]
        self._layers = layers
        self._change = mixture["quantize_change_ratio"] if mixture["enabled"] else None
        self._verbose = shared["quantize_verbose"]
        self.steps = 0
        self.share_kept = 1.0  # of weights as they are, in a mixture

    def is_due(self) -> bool:
        """Whether the next step lowers bits."""
        return any(layer.bits != layer.target_bits and self.steps + 1 >= layer.period for layer in self._layers)

    def advance(self, factors: dict[int, int] | None = None) -> None:
        """One step. `factors`: by a layer's index, what its next period is multiplied by besides doubling."""
        self.steps += 1
        if self._change is not None:
            self.share_kept = self.share_kept - self._change if self.share_kept > 0 else 0.0
        for index, layer in enumerate(self._layers):
            if layer.bits != layer.target_bits and self.steps >= layer.period:
                self.share_kept = 1.0
                layer.period = (layer.period << 1) * (factors or {}).get(index, 1)
                layer.bits -= 1
                if self._verbose:
                    say(f"weight {index} has {layer.bits} bits after {self.steps} steps; period {layer.period}")
            layer.on = True
            layer.draws = self.steps
            layer.share_kept = self.share_kept if self._change is not None else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        layers = [[layer.bits, layer.period, layer.share_kept] for layer in self._layers]
        return {"steps": self.steps, "share_kept": self.share_kept, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was."""
        self.steps, self.share_kept = state["steps"], state["share_kept"]
        for layer, (bits, period, share_kept) in zip(self._layers, state["layers"], strict=True):
            layer.bits, layer.period, layer.share_kept = bits, period, share_kept
            layer.on, layer.draws = self.steps > 0, self.steps


class _Curvature:
    """Blocks' eigenvalues, from which factors of their layers' next periods follow."""

    def __init__(self, eigenvalue: Eigenvalue, model: nn.Module) -> None:
        self._eigenvalue = eigenvalue
        self._model = model
        self._factors: dict[int, int] | None = None
        block_of = {
            id(module): number for number, block in enumerate(eigenvalue.blocks(model)) for module in block.modules()
        }
        falling = [layer for layer in compressed_layers(model) if _falls(layer)]
        self._block = {index: block_of[id(layer)] for index, layer in enumerate(falling) if id(layer) in block_of}

    @classmethod
    def of(cls, section: dict[str, Any], model: nn.Module) -> _Curvature | None:
        """The curvature that the section "quantize_training" asks for; None: it does not."""
        part = {key: value for key, value in section["eigenvalue"].items() if key not in ("enabled", "model_name")}
        return cls(Eigenvalue(**part), model) if section["enabled"] and section["eigenvalue"]["enabled"] else None

    def measure(self, step: int, loss: Tensor, mean: Callable[[float], float]) -> None:
        """Errors: ConfigError where an operator of the model has no second derivative."""
        if step % self._eigenvalue.gas_boundary_resolution:
            return
        try:
            values = [mean(value) for value in self._eigenvalue.of_loss(loss, self._model)]
        except RuntimeError as error:
            if "derivative" not in str(error):
                raise
            raise ConfigError(
                f"quantize_training.eigenvalue: an operator of the model has no second derivative ({error}); use "
                "attention made of plain operators, in Transformers attn_implementation='eager'"
            ) from error
        shares = Eigenvalue.normalised(values)
        self._factors = {index: 1 + math.floor(4 * shares[block]) for index, block in self._block.items()}

    def take_factors(self) -> dict[int, int] | None:
        """Those that were measured since the last step."""
        factors, self._factors = self._factors, None
        return factors


def _falls(layer: CompressedLayer) -> bool:
    weight = layer._compression.weight
    return weight is not None and not weight.in_forward


class CompressionSchedule:
    """The techniques of a model's layers, by the optimizer steps so far. The engine advances its own."""

    def __init__(self, model: nn.Module, compression_config: ConfigSource) -> None:
        config = load_config(compression_config)
        section = read_section(config)
        shared = section["weight_quantization"]["shared_parameters"]
        layers = self._layers = compressed_layers(model)
        weights = [layer._compression.weight for layer in layers]
        falling = [weight for weight in weights if weight is not None and not weight.in_forward]
        self._falling = FallingBits(falling, shared) if falling else None
        self._offset = shared["schedule_offset"]
        self._curvature = _Curvature.of(read_older(config), model)
        self._techniques = [
            one
            for layer in layers
            for one in layer._compression.all()
            if not isinstance(one, WeightQuantization) or one.in_forward
        ]
        self.training_steps = 0
        self._begin()

    def share_masks(self, broadcast: Callable[[Tensor, int], None]) -> None:
        """Collective. All ranks prune what the first one does: their models may have begun with other weights."""
        for layer in self._layers:
            for pruning in layer._compression.pruning:
                if not pruning.scored:
                    broadcast(pruning.mask(layer).view(torch.uint8), 0)

    def _begin(self) -> None:
        if self._falling is not None and self._offset == 0:
            self._falling.advance()
        self._follow()

    def _follow(self) -> None:
        for one in self._techniques:
            one.on = self.training_steps >= one.offset
            if isinstance(one, WeightQuantization):
                one.draws = self.training_steps

    def step(self, step_zero_check: bool = False) -> None:
        """After an optimizer step that was applied; with step_zero_check, before the first one."""
        if step_zero_check:
            return
        if self._falling is not None and self.training_steps >= self._offset:
            self._falling.advance(None if self._curvature is None else self._curvature.take_factors())
        self.training_steps += 1
        self._follow()

    def before_backward(self, loss: Tensor, mean: Callable[[float], float]) -> None:
        """Measures curvature at a step's last loss if the step lowers bits. `mean`: over ranks. Collective."""
        if self._curvature is None or self._falling is None or self.training_steps < self._offset:
            return
        if self._falling.is_due():
            self._curvature.measure(self.training_steps, loss, mean)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resume needs."""
        falling = None if self._falling is None else self._falling.state_dict()
        return {"steps": self.training_steps, "falling": falling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was."""
        self.training_steps = state["steps"]
        if self._falling is not None and state["falling"] is not None:
            self._falling.load_state_dict(state["falling"])
        self._follow()
