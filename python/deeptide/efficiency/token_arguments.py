# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of a layer for the tokens that random-LTD keeps: masks, positions and their embeddings.

Shapes: B batch, S sequence, K tokens that are kept, D hidden.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor

from deeptide._C import ConfigError

_MASK = "attention_mask"  # Transformers' name, where model_mask_name gives none
_ACROSS = "encoder_attention_mask"  # its columns are tokens of another sequence
_POSITIONS = ("position_ids", "position_embeddings")
_CURE = "pass it by token, or leave the layer out of random_ltd_layer_id"


@functools.cache
def names_of(kind: type) -> tuple[str, ...]:
    """The names of the arguments that a layer's forward takes by position, after the hidden states."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(forward).parameters.values() if p.kind in by_position)[2:]


class Call:
    """One call of a layer, whose arguments are cut to the kept tokens."""

    def __init__(self, layer: str, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer, self._count = layer, len(args)
        names = names_of(kind)
        self._names = [*names[: len(args)], *(f"argument {i + 1}" for i in range(len(names), len(args)))]
        self.named = {**dict(zip(self._names, args)), **kwargs}
        self._uncut: list[str] = []

    @property
    def args(self) -> tuple[Any, ...]:
        """Those by position."""
        return tuple(self.named[name] for name in self._names)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Those by name."""
        return {name: value for name, value in self.named.items() if name not in self._names}

    def keep(self, indices: Tensor, length: int, mask_name: str | None, is_encoder: bool) -> None:
        """Cuts what belongs to tokens, (B, K) of S. Errors: ConfigError if an argument has another form."""
        if mask_name is not None and mask_name not in self.named:
            raise ConfigError(
                f"random-LTD: layer {self._layer} was called without the argument {mask_name!r} (model_mask_name); "
                "pass the mask by this name, or leave model_mask_name out"
            )
        for name, value in self.named.items():
            if value is None:
                continue
            if name == (mask_name or _MASK):
                self.named[name] = self._mask(name, value, indices, length, is_encoder)
            elif name == _ACROSS and isinstance(value, Tensor) and value.dim() > 2 and value.size(-2) == length:
                self.named[name] = torch.ops.deeptide.choose_tokens(value, indices, value.dim() - 2)
            elif name in _POSITIONS:
                self.named[name] = self._positions(name, value, indices, length)
            elif isinstance(value, Tensor) and length in value.shape:
                self._uncut.append(f"{name} {tuple(value.shape)}")

    def _mask(self, name: str, mask: Any, indices: Tensor, length: int, is_encoder: bool) -> Tensor:
        fits = isinstance(mask, Tensor) and mask.dim() > 1 and mask.size(-1) == length
        is_square = fits and not is_encoder and mask.dim() == 2 and mask.size(0) == length
        if not fits or not (is_square or mask.size(0) in (1, indices.size(0))):
            self._reject(name, mask, indices.size(0), length)
        kept: Tensor = torch.ops.deeptide.mask_of_kept(mask, indices, length, is_encoder)
        return kept

    def _positions(self, name: str, value: Any, indices: Tensor, length: int) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self._positions(name, one, indices, length) for one in value)
        rows = (1, indices.size(0))
        if not isinstance(value, Tensor) or value.dim() < 2 or value.size(1) != length or value.size(0) not in rows:
            self._reject(name, value, indices.size(0), length)
        return torch.ops.deeptide.choose_tokens(value, indices, 1)

    def _reject(self, name: str, value: Any, batch: int, length: int) -> NoReturn:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"random-LTD: layer {self._layer}, argument {name!r}: got {got}, expected a tensor with {batch} "
            f"rows or one, of {length} tokens; {_CURE}"
        )

    def explain(self, error: RuntimeError) -> ConfigError | None:
        """The reason of a layer's error, where arguments of all tokens came with a part of the tokens."""
        if not self._uncut or isinstance(error, torch.OutOfMemoryError) or "size" not in str(error):
            return None
        return ConfigError(
            f"random-LTD: layer {self._layer} failed with a part of its tokens, and with arguments that may be of all: "
            f"{', '.join(self._uncut)}; name a mask among them in model_mask_name, or leave the layer out of "
            f"random_ltd_layer_id. The layer's error: {error}"
        )
