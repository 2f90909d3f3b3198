# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Random-LTD: layers that see a random part of the tokens. Source: Yao et al., arXiv:2211.11586.

Shapes: B batch, S sequence, K tokens that are kept, D hidden, L layers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeptide._C import ConfigError
from deeptide.efficiency.layer_drop import DEPTH, Added, DroppedLayer, plain_copy, refuse_parts
from deeptide.efficiency.token_arguments import Call

if TYPE_CHECKING:
    from deeptide import _C


def sample_tokens(reserved_length: int, seq_length: int, batch_size: int, layers: int, device: Any) -> Tensor:
    """Positions to keep, ascending, without repetition, by torch's generator of `device`: (L, B, K), int64."""
    place = torch.device(device)
    drawn: Tensor = torch.ops.deeptide.sample_tokens(reserved_length, seq_length, batch_size, layers, place)
    return drawn


def gather_tokens(activations: Tensor, sorted_indices: Tensor, batch_first: bool = True) -> Tensor:
    """The kept tokens: (B, S, D) and (B, K) -> (B, K, D); with batch_first False (S, B, D) -> (K, B, D)."""
    kept: Tensor = torch.ops.deeptide.gather_tokens(activations, sorted_indices, batch_first)
    return kept


def scatter_tokens(
    all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool = True
) -> Tensor:
    """`all_activations` with the kept tokens replaced by what the layer made of them; the others keep theirs."""
    whole: Tensor = torch.ops.deeptide.scatter_tokens(all_activations, layer_activations, sorted_indices, batch_first)
    return whole


class GatherTokens:
    """DeepSpeed's name of the operation: `apply` returns the activations and the kept ones."""

    @staticmethod
    def apply(activations: Tensor, sorted_indices: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """See gather_tokens."""
        return activations, gather_tokens(activations, sorted_indices, batch_first)


class ScatterTokens:
    """DeepSpeed's name of the operation."""

    @staticmethod
    def apply(all_activations: Tensor, layer_activations: Tensor, sorted_indices: Tensor, batch_first: bool) -> Tensor:
        """See scatter_tokens."""
        return scatter_tokens(all_activations, layer_activations, sorted_indices, batch_first)


def slice_attn_mask(mask: Tensor, reserved_length: int) -> Tensor:
    """A decoder's mask for K tokens."""
    cut: Tensor = torch.ops.deeptide.cut_mask(mask, reserved_length, mask.size(-1))
    return cut


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: Any = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(L, B, K) positions, and a decoder's mask for K tokens."""
    indices = sample_tokens(reserved_length, seq_length, batch_size, layers, device).int()
    cut = None if attn_mask is None else torch.ops.deeptide.cut_mask(attn_mask, reserved_length, seq_length)
    return indices, cut


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: Any = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """(L, B, K) positions, and for each layer an encoder's mask of them. Errors: ConfigError without a mask."""
    if attn_mask is None:
        raise ConfigError("bert_sample_tokens: an encoder's tokens need attn_mask; give the mask of all tokens")
    indices = sample_tokens(reserved_length, seq_length, batch_size, layers, device).int()
    return indices, [torch.ops.deeptide.choose_mask(attn_mask, layer, seq_length) for layer in indices]


class RandomLayerTokenDrop(Added):
    """A layer that sees a random part of its tokens while it trains. `RandomLayerTokenDrop(layer)` changes the layer.

    The layer stays the same object, with its parameters' names, and becomes an instance of this class too: state dicts
    and checkpoints are those of the model without it. Until `init_config` it does what it did.
    """

    _ltd: dict[str, Any]

    def __new__(cls, layer: torch.nn.Module) -> Any:
        """Returns the layer itself."""
        kind = type(layer)
        if issubclass(kind, RandomLayerTokenDrop):
            return layer
        refuse_parts(layer, "random-LTD")
        # Layer drop draws first, whichever of the two came first: the numbers of a seed depend on no order of calls.
        is_dropped = kind.__bases__[0] is DroppedLayer
        below = kind.__bases__[1] if is_dropped else kind
        names = {"__module__": kind.__module__}
        made: type = type(kind.__name__, (RandomLayerTokenDrop, below), names)
        layer.__class__ = type(kind.__name__, (DroppedLayer, made), names) if is_dropped else made
        layer.__dict__["_ltd"] = {}
        return layer

    def __init__(self, layer: torch.nn.Module) -> None:
        """Leaves the layer as __new__ returned it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that follows the same schedule of tokens, and drops no layers."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        for name, value in self.__dict__.items():
            if name == DEPTH:
                continue
            other.__dict__[name] = dict(value) if name == "_ltd" else copy.deepcopy(value, memo)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the plain class, which belongs to no engine."""
        return plain_copy(self, super().__reduce_ex__(protocol), "_ltd")

    def init_config(self, config: dict[str, Any], schedule: _C.RandomLtdSchedule, random_ltd_layer_id: int) -> None:
        """Begins to drop tokens. `config`: the section "random_ltd"."""
        self._ltd.update(
            schedule=schedule,
            name=type(self).__name__,
            kind=next(k for k in type(self).__mro__ if not issubclass(k, Added)),
            mask_name=config.get("model_mask_name"),
            encoder=config["model_type"] == "encoder",
            batch_first=config["hidden_state_order"] == "batch_seq_dim",
        )

    def name_layer(self, path: str) -> None:
        """Tells errors the layer's path in the model."""
        self._ltd["name"] = path

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output; for the tokens that it did not see, its input."""
        layer = super().forward
        settings = self._ltd
        if not settings or not self.training:
            return layer(hidden_states, *args, **kwargs)
        first = settings["batch_first"]
        batch, length = hidden_states.shape[:2] if first else (hidden_states.size(1), hidden_states.size(0))
        kept = settings["schedule"].position[1]
        if kept >= length:
            return layer(hidden_states, *args, **kwargs)
        # Each layer draws by itself, so that a recomputation of one layer finds torch's generator where it was.
        indices = sample_tokens(kept, length, batch, 1, hidden_states.device)[0]
        call = Call(settings["name"], settings["kind"], args, kwargs)
        call.keep(indices, length, settings["mask_name"], settings["encoder"])
        try:
            part = layer(gather_tokens(hidden_states, indices, first), *call.args, **call.kwargs)
        except RuntimeError as error:
            reason = call.explain(error)
            if reason is None:
                raise
            raise reason from error
        if isinstance(part, tuple):
            return (scatter_tokens(hidden_states, part[0], indices, first), *part[1:])
        if not isinstance(part, torch.Tensor):
            raise ConfigError(f"random-LTD: a layer returned {type(part).__name__}, expected a tensor or a tuple")
        return scatter_tokens(hidden_states, part, indices, first)


def convert_to_random_ltd(model: Any, convert_type: Any) -> Any:
    """Makes every module of `convert_type` in an engine's model drop tokens, as "random_ltd" says; returns the engine.

    Errors: ConfigError where the section is off, or its layer numbers do not match the layers' names.
    """
    for module in list(getattr(model, "module", model).modules()):
        if isinstance(module, convert_type):
            RandomLayerTokenDrop(module)
    model.random_ltd_initialize()
    return model


def save_without_random_ltd(model: Any) -> Any:
    """The model's state dict, whose names random-LTD leaves as they are."""
    return getattr(model, "module", model).state_dict()


def remove_random_ltd_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that DeepSpeed wrote with random-LTD, under the model's own names."""
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}
