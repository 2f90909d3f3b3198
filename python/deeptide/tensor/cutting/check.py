# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One small forward of a model before and after its layers are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deeptide._C import CommError, ConfigError
from deeptide._process.log import say

_LENGTH = 6
_MISFIT = (
    "a layer is used in another way than its name says. Name the layers to cut in tensor_parallel.partition_config"
)


def example_of(model: nn.Module) -> dict[str, Any] | None:
    """Keyword arguments of a small forward, of a model of Transformers that takes words; None for others."""
    config = getattr(model, "config", None)
    words = getattr(config, "vocab_size", None)
    if not isinstance(words, int) or getattr(model, "main_input_name", None) != "input_ids":
        return None
    tokens = (torch.arange(2 * _LENGTH).view(2, _LENGTH) * 7 + 3) % words
    example: dict[str, Any] = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        example["decoder_input_ids"] = tokens
    return example


def outputs_of(model: nn.Module, example: dict[str, Any]) -> list[torch.Tensor]:
    """The floating tensors that the model returns, in evaluation mode and in fp32."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            result = model(**example)
    finally:
        for module, training in modes:
            module.training = training
    if isinstance(result, torch.Tensor):
        result = [result]
    values = result.values() if isinstance(result, dict) else result
    return [value.float() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def compare(whole: list[torch.Tensor], cut: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Errors: ConfigError if the model that is cut computes something else than the whole one did."""
    share = 64 * torch.finfo(dtype).eps  # of the largest output: sums are taken in parts, each rounded, in every layer
    for number, (before, after) in enumerate(zip(whole, cut, strict=True)):
        largest = before.abs().max().item() if before.numel() else 0.0
        differs = before.shape != after.shape
        most = float("inf") if differs else (before - after).abs().max().item() if before.numel() else 0.0
        if differs or not most <= share * max(largest, 1e-3):
            raise ConfigError(
                f"output {number} of the model whose layers are cut differs by up to {most:.3g} from that of the whole "
                f"model, whose largest value is {largest:.3g}: {_MISFIT}, or set parallel.tensor_check to false if the "
                "model draws random numbers in evaluation mode"
            )


def outputs_of_cut(model: nn.Module, example: dict[str, Any]) -> list[torch.Tensor]:
    """The same of a model whose layers are cut. Errors: ConfigError if it cannot run, as the whole one could."""
    try:
        return outputs_of(model, example)
    except Exception as error:  # the model may raise what it likes
        if isinstance(error, CommError):
            raise
        raise ConfigError(
            f"the model whose layers are cut cannot run, and the whole one can ({_first_line(error)}): {_MISFIT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def tell_unchecked(model: nn.Module) -> None:
    """Says that no input is known."""
    say(
        f"tensor: {type(model).__name__} is not compared with the whole model, since its inputs are not known: give "
        "split_model an example before initialize"
    )
