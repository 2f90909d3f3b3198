# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that are compressed while they train. A layer stays the same object, and its parameters keep their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from deeptide._C import ConfigError
from deeptide.compression.quantizers import straight_through
from deeptide.compression.techniques import ActivationQuantization, Pruning, WeightQuantization

_OF_LINEAR = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
)
_OF_CONV2D = ("weight_quantization", "activation_quantization", "sparse_pruning", "channel_pruning")


@dataclasses.dataclass
class Techniques:
    """Those of one layer, and the class that it had."""

    kind: type[nn.Module]
    weight: WeightQuantization | None = None
    activation: ActivationQuantization | None = None
    pruning: list[Pruning] = dataclasses.field(default_factory=list)

    def all(self) -> Iterator[WeightQuantization | ActivationQuantization | Pruning]:
        """Each technique."""
        yield from (one for one in (self.weight, self.activation, *self.pruning) if one is not None)


class CompressedLayer(nn.Module):
    """The second base of every compressed layer."""

    _compression: Techniques

    def compressed(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of now, as forward uses them."""
        techniques = self._compression
        weight: Tensor = self.weight  # type: ignore[assignment]
        bias: Tensor | None = getattr(self, "bias", None)
        if techniques.weight is not None and techniques.weight.on:
            weight = straight_through(weight, techniques.weight.values(weight))
        for pruning in techniques.pruning:
            if pruning.on:
                weight, bias = pruning.values(self, weight, bias)
        return weight, bias

    def _input(self, x: Tensor) -> Tensor:
        quantization = self._compression.activation
        return quantization.values(self, x) if quantization is not None and quantization.on else x


class CompressedLinear(CompressedLayer):
    """A torch.nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) -> (…, O)."""
        weight, bias = self.compressed()
        return F.linear(self._input(input), weight, bias)


class CompressedConv2d(CompressedLayer):
    """A torch.nn.Conv2d."""

    _conv_forward: Any

    def forward(self, input: Tensor) -> Tensor:
        """(N, I, H, W) -> (N, O, H', W')."""
        weight, bias = self.compressed()
        output: Tensor = self._conv_forward(self._input(input), weight, bias)
        return output


class CompressedEmbedding(CompressedLayer):
    """A torch.nn.Embedding: only its weight is quantised."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def forward(self, input: Tensor) -> Tensor:
        """(…) -> (…, D)."""
        weight, _ = self.compressed()
        return F.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


_KINDS: tuple[tuple[type[nn.Module], type[CompressedLayer], tuple[str, ...]], ...] = (
    (nn.Linear, CompressedLinear, _OF_LINEAR),
    (nn.Conv2d, CompressedConv2d, _OF_CONV2D),
    (nn.Embedding, CompressedEmbedding, ("weight_quantization",)),
)


def can_take(module: nn.Module, technique: str) -> bool:
    """Whether the technique is one for this kind of layer."""
    return any(isinstance(module, kind) and technique in techniques for kind, _, techniques in _KINDS)


def techniques_of(module: nn.Module, name: str) -> Techniques:
    """Those of the layer `name`, which becomes a compressed one if it is not. Errors: ConfigError for other classes."""
    if isinstance(module, CompressedLayer):
        return module._compression
    kind = type(module)
    plain, compressed = next((plain, ours) for plain, ours, _ in _KINDS if isinstance(module, plain))
    if kind.forward is not plain.forward:
        raise ConfigError(
            f"init_compression: {name} is a {kind.__name__}, whose forward is not {plain.__name__}'s, so that it could "
            "not be compressed; leave it out of the patterns of compression_training"
        )
    module.__class__ = type(kind.__name__, (compressed, kind), {"__module__": kind.__module__})
    module.__dict__["_compression"] = Techniques(kind)
    return module._compression  # type: ignore[return-value]


def compressed_layers(model: nn.Module) -> list[CompressedLayer]:
    """Those of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, CompressedLayer)]


def restore(layer: CompressedLayer) -> None:
    """Makes a layer without techniques what it was."""
    if any(layer._compression.all()):
        return
    kind = layer._compression.kind
    del layer.__dict__["_compression"]
    layer.__class__ = kind  # type: ignore[assignment]
