# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's transformer layer: BERT's, with fused query, key and value, and activations that backward computes again.

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deeptide import _C
from deeptide._C import ConfigError


class DeepSpeedTransformerConfig:
    """The settings of a layer.

    `pre_layer_norm`: norms before attention and MLP, else after. `initializer_range`: the standard deviation of
    weights; with `adjust_init_range`, of those before a residual sum over sqrt(2 num_hidden_layers). Memory for time:
    `normalize_invertible` keeps a norm's output and not its input, `gelu_checkpoint` computes the GELU again in
    backward, `attn_dropout_checkpoint` the dropout of attention. `gelu`: "tanh", DeepSpeed's, or "none", BERT's exact
    one. Without effect here: `batch_size`, `local_rank`, `seed` (torch's generator draws), `fp16` (the weights have the
    type), `stochastic_mode` (results repeat at no cost), `training` (the module knows).
    """

    layer_id = -1

    def __init__(
        self,
        batch_size: int = -1,
        hidden_size: int = -1,
        intermediate_size: int = -1,
        heads: int = -1,
        attn_dropout_ratio: float = -1,
        hidden_dropout_ratio: float = -1,
        num_hidden_layers: int = -1,
        initializer_range: float = -1,
        layer_norm_eps: float = 1e-12,
        local_rank: int = -1,
        seed: int = -1,
        fp16: bool = False,
        pre_layer_norm: bool = True,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        adjust_init_range: bool = True,
        attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False,
        return_tuple: bool = False,
        training: bool = True,
        gelu: str = "tanh",
    ) -> None:
        self.batch_size, self.hidden_size, self.heads = batch_size, hidden_size, heads
        self.intermediate_size = intermediate_size if intermediate_size > 0 else 4 * hidden_size
        self.attn_dropout_ratio, self.hidden_dropout_ratio = attn_dropout_ratio, hidden_dropout_ratio
        self.num_hidden_layers, self.initializer_range = num_hidden_layers, initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.local_rank, self.seed, self.fp16, self.stochastic_mode = local_rank, seed, fp16, stochastic_mode
        self.pre_layer_norm, self.adjust_init_range = pre_layer_norm, adjust_init_range
        self.normalize_invertible = normalize_invertible
        self.gelu_checkpoint, self.attn_dropout_checkpoint = gelu_checkpoint, attn_dropout_checkpoint
        self.return_tuple, self.training, self.gelu = return_tuple, training, gelu

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        """A configuration with these fields; others keep their defaults. Errors: ConfigError for an unknown one."""
        config = cls()
        for key, value in json_object.items():
            if key not in config.__dict__:
                raise ConfigError(f"DeepSpeedTransformerConfig: {key}: unknown; known: {', '.join(config.__dict__)}")
            setattr(config, key, value)
        if config.intermediate_size <= 0:
            config.intermediate_size = 4 * config.hidden_size
        return config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> DeepSpeedTransformerConfig:
        """from_dict of a file in UTF-8 or, as DeepSpeed reads it, UTF-16."""
        with open(json_file, "rb") as file:
            content = file.read()
        return cls.from_dict(json.loads(content))  # which finds the encoding

    def check(self) -> None:
        """Errors: ConfigError naming the field."""
        _C.check_transformer_layer(
            self.hidden_size,
            self.heads,
            self.attn_dropout_ratio,
            self.hidden_dropout_ratio,
            self.num_hidden_layers,
            self.initializer_range,
            self.adjust_init_range,
        )
        if self.gelu not in ("tanh", "none"):
            raise ConfigError(f"DeepSpeedTransformerConfig: gelu: got {self.gelu!r}, expected 'tanh' or 'none'")


_NAMES = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")


class DeepSpeedTransformerLayer(nn.Module):
    """One layer.

    `initial_weights` and `initial_biases`: its tensors, in the order query, key, value, attention's output, its norm,
    intermediate, output, last norm.
    """

    layer_id = 0

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = ((3 * hidden, hidden), (hidden, hidden), (hidden,), (inner, hidden), (hidden, inner), (hidden,))
        for name, shape in zip(_NAMES, shapes, strict=True):
            self.register_parameter(name + "w", nn.Parameter(torch.empty(shape)))
            self.register_parameter(name + "b", nn.Parameter(torch.empty(shape[0])))
        self.init_transformer_weights(config.adjust_init_range)
        with torch.no_grad():
            for values, suffix in ((initial_weights, "w"), (initial_biases, "b")):
                if values is not None:
                    self._take(list(values), suffix)

    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter
    norm_w: nn.Parameter
    norm_b: nn.Parameter

    def _take(self, values: list[Tensor], suffix: str) -> None:
        for name, value in zip(_NAMES, [torch.cat(values[:3]), *values[3:]], strict=True):
            parameter: nn.Parameter = getattr(self, name + suffix)
            if parameter.shape != value.shape:
                raise ConfigError(
                    f"DeepSpeedTransformerLayer: {name}{suffix}: got a tensor of shape {list(value.shape)}, expected "
                    f"{list(parameter.shape)}"
                )
            parameter.data = value.detach().clone()

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draws the weights anew."""
        deviation = self.config.initializer_range
        before_sum = deviation / math.sqrt(2.0 * self.config.num_hidden_layers) if adjust_init_range else deviation
        for weight, spread in (
            (self.attn_qkvw, deviation),
            (self.attn_ow, before_sum),
            (self.inter_w, deviation),
            (self.output_w, before_sum),
        ):
            nn.init.normal_(weight, 0.0, spread)
        for norm in (self.attn_nw, self.norm_w):
            nn.init.ones_(norm)
        for name, parameter in self.named_parameters():
            if name.endswith("b"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
    ) -> Any:
        """(B, S, D) and a mask that is added to scores, (B, 1, 1 or S, S), -> (B, S, D), or the tuple of it."""
        refused = {
            "head_mask": head_mask,
            "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
            "output_attentions": output_attentions or None,
            "grads": grads,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"DeepSpeedTransformerLayer: {name} has no meaning for this layer; leave it out")
        config, training = self.config, self.training
        config.training = training
        output: Tensor = torch.ops.deeptide.transformer_layer(
            hidden_states,
            attention_mask,
            [getattr(self, name + suffix) for name in _NAMES for suffix in "wb"],
            config.heads,
            config.attn_dropout_ratio if training else 0.0,
            config.hidden_dropout_ratio if training else 0.0,
            config.layer_norm_eps,
            config.pre_layer_norm,
            config.normalize_invertible,
            config.gelu_checkpoint,
            config.attn_dropout_checkpoint,
            config.gelu == "none",
        )
        return (output,) if config.return_tuple else output
