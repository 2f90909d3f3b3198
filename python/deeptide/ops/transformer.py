# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's transformer layer: BERT's, with fused query, key and value, and activations that backward computes again.

Shapes: B batch, S sequence, D hidden, I intermediate, H heads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deeptide import ops
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
        for name in ("hidden_size", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"DeepSpeedTransformerConfig: {name}: got {getattr(self, name)}, expected 1 or more")
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"DeepSpeedTransformerConfig: heads: {self.heads} does not divide hidden_size, {self.hidden_size}"
            )
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"DeepSpeedTransformerConfig: {name}: got {getattr(self, name)}, expected 0 to below 1"
                )
        if self.initializer_range < 0 or (self.adjust_init_range and self.num_hidden_layers < 1):
            raise ConfigError(
                f"DeepSpeedTransformerConfig: initializer_range {self.initializer_range} and num_hidden_layers "
                f"{self.num_hidden_layers}: expected 0 or more, and 1 or more"
            )
        if self.gelu not in ("tanh", "none"):
            raise ConfigError(f"DeepSpeedTransformerConfig: gelu: got {self.gelu!r}, expected 'tanh' or 'none'")


class _InvertibleNorm(torch.autograd.Function):
    """A layer norm that keeps its output: (y - bias) / weight is its input, normalized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, _, scale = torch.native_layer_norm(x, (x.size(-1),), weight, bias, eps)
        ctx.save_for_backward(y, weight, bias, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, weight, bias, scale = ctx.saved_tensors
        wide = torch.promote_types(y.dtype, torch.float32)
        g, w = gradients[0].to(wide), weight.to(wide)
        normed = torch.where(w == 0, 0.0, (y.to(wide) - bias.to(wide)) / w)  # a weight of 0 has lost it
        wg = g * w
        means = wg.mean(-1, keepdim=True), (wg * normed).mean(-1, keepdim=True)
        x_gradient = scale.to(wide) * (wg - means[0] - normed * means[1])
        rows = tuple(range(y.dim() - 1))
        return (
            x_gradient.to(y.dtype),
            (g * normed).sum(rows).to(weight.dtype),
            g.sum(rows).to(bias.dtype),
            None,
        )


def _again(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The function's value; backward computes what is inside again, with the same random numbers."""
    value: Tensor = checkpoint(function, *tensors, use_reentrant=False)
    return value


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
        shapes = {
            "attn_qkv": (3 * hidden, hidden),
            "attn_o": (hidden, hidden),
            "attn_n": (hidden,),
            "inter_": (inner, hidden),
            "output_": (hidden, inner),
            "norm_": (hidden,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name + "w", nn.Parameter(torch.empty(shape)))
            self.register_parameter(name + "b", nn.Parameter(torch.empty(shape[0])))
        self.init_transformer_weights(config.adjust_init_range)
        with torch.no_grad():
            for values, suffix in ((initial_weights, "w"), (initial_biases, "b")):
                if values is not None:
                    self._take(list(values), list(shapes), suffix)

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

    def _take(self, values: list[Tensor], names: list[str], suffix: str) -> None:
        for name, value in zip(names, [torch.cat(values[:3]), *values[3:]], strict=True):
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
        self.config.training = self.training
        x = hidden_states
        if self.config.pre_layer_norm:
            attended = self._attention(self._norm(x, self.norm_w, self.norm_b), attention_mask)
            middle, summed = self._sum_and_norm(attended, x, self.attn_nw, self.attn_nb)
            output = self._dropped(self._mlp(middle)) + summed
        else:
            middle, _ = self._sum_and_norm(self._attention(x, attention_mask), x, self.attn_nw, self.attn_nb)
            output, _ = self._sum_and_norm(self._mlp(middle), middle, self.norm_w, self.norm_b)
        return (output,) if self.config.return_tuple else output

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.hidden_dropout_ratio, self.training)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.config.normalize_invertible:
            y: Tensor = _InvertibleNorm.apply(x, weight, bias, self.config.layer_norm_eps)  # type: ignore[no-untyped-call]
            return y
        return ops.layer_norm(x, (x.size(-1),), weight, bias, self.config.layer_norm_eps)

    def _sum_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of dropout(x) + residual, and the sum."""
        x = self._dropped(x)
        if self.config.normalize_invertible:
            summed = x + residual
            return self._norm(summed, weight, bias), summed
        return ops.residual_layer_norm(x, residual, (x.size(-1),), weight, bias, self.config.layer_norm_eps)

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.config.heads
        qkv = ops.linear(x, self.attn_qkvw, self.attn_qkvb).view(batch, length, 3, heads, hidden // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if mask is not None:
            mask = mask.to(query.dtype)
        ratio = self.config.attn_dropout_ratio if self.training else 0.0
        if ratio == 0:
            context = ops.attention(query, key, value, mask)
        else:
            context = self._dropped_attention(query, key, value, mask, ratio)
        context = context.transpose(1, 2).reshape(batch, length, hidden)
        return ops.linear(context, self.attn_ow, self.attn_ob)

    def _dropped_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ratio: float
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        shares = (scores if mask is None else scores + mask).softmax(-1)

        def weigh(shares: Tensor, value: Tensor) -> Tensor:
            return F.dropout(shares, ratio) @ value

        if not self.config.attn_dropout_checkpoint:
            return weigh(shares, value)
        return _again(weigh, shares, value.contiguous())  # as a view it would keep query and key with it

    def _mlp(self, x: Tensor) -> Tensor:
        inner = ops.linear(x, self.inter_w, self.inter_b)

        def rest(inner: Tensor) -> Tensor:
            active = ops.gelu_tanh(inner) if self.config.gelu == "tanh" else F.gelu(inner)
            return ops.linear(active, self.output_w, self.output_b)

        return _again(rest, inner) if self.config.gelu_checkpoint else rest(inner)
