# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small inputs of models: of Transformers' from what their configurations say, of others from their layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

_WORDS = 6
_SAMPLES = 4000  # of sound: a quarter of a second, a dozen frames of wav2vec 2
_FRAMES = 32
_PIXELS = 64  # of models that take pictures of any size

Example = dict[str, Any]  # keyword arguments of forward


def examples_of(model: Any, ranks: int = 1) -> Iterator[Example]:
    """Yields what the model's forward may take, the likeliest first.

    Words are so many that they divide among the ranks.
    """
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    words = -(-_WORDS // ranks) * ranks
    if config is None or not hasattr(config, "to_dict"):
        yield from _of_layers(model, words)
        return
    makers: dict[str, Callable[[Any], Iterator[Example]]] = {
        "input_ids": functools.partial(_texts, words=words),
        "pixel_values": functools.partial(_pictures, otherwise=_PIXELS),
        "input_values": _sounds,
        "input_features": _spectra,
    }
    for example in makers.get(str(main), lambda _config: iter(()))(config):
        first, rows = next(model.parameters()), next(iter(example.values())).size(0)
        if getattr(config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = _words(getattr(config, "decoder", config), words, rows)
        yield {
            key: value.to(first.device, first.dtype if value.is_floating_point() else value.dtype)
            for key, value in example.items()
        }


def _of_layers(model: torch.nn.Module, words: int) -> Iterator[Example]:
    """Words for a model with an embedding, else what its first linear layer takes, as all arguments that it needs."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names = [each.name for each in positional if each.default is each.empty] or [each.name for each in positional[:1]]
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    linear = next((module for module in model.modules() if isinstance(module, torch.nn.Linear)), None)
    first = next(iter(model.parameters()), None)
    if first is None or not names:
        return
    if tables:
        numbers = (torch.arange(2 * words).view(2, words) * 7 + 3) % min(tables)
        yield dict.fromkeys(names, numbers.to(first.device))
    elif linear is not None:
        yield dict.fromkeys(names, waves(2, words, linear.in_features).to(first.device, first.dtype))
        yield dict.fromkeys(names, waves(2, linear.in_features).to(first.device, first.dtype))


def _texts(config: Any, words: int) -> Iterator[Example]:
    if _find(config, "vocab_size") is None:
        return
    yield {"input_ids": _words(config, words)}
    yield {"input_ids": _words(config, words).unsqueeze(0)}  # two choices of one question
    for picture in _pictures(config):  # models of both, such as CLIP, want both
        yield {"input_ids": _words(config, words), **picture}


def _pictures(config: Any, otherwise: int | None = None) -> Iterator[Example]:
    size = _find(config, "image_size") or _find(config, "video_size") or otherwise
    if size is None:
        return
    height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
    shape = (_find(config, "num_channels") or 3, height, width)
    frames = _find(config, "num_frames")
    if frames is not None:
        yield {"pixel_values": waves(1, frames, *shape)}
    yield {"pixel_values": waves(1, *shape)}


def _sounds(config: Any) -> Iterator[Example]:
    bins, length = _find(config, "num_mel_bins"), _find(config, "max_length")
    if bins is not None and length is not None:  # a spectrum by this name, as the audio spectrogram transformer has it
        yield {"input_values": waves(1, length, bins)}
    yield {"input_values": waves(1, _SAMPLES)}


def _spectra(config: Any) -> Iterator[Example]:
    bins, positions = _find(config, "num_mel_bins"), _find(config, "max_source_positions")
    if bins is not None and positions is not None:  # Whisper's, which halves the length once
        yield {"input_features": waves(1, bins, 2 * positions)}
    for key in ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins"):
        if (features := _find(config, key)) is not None:
            yield {"input_features": waves(1, _FRAMES, features)}


def _words(config: Any, words: int, rows: int = 2) -> torch.Tensor:
    return (torch.arange(rows * words).view(rows, words) * 7 + 3) % (_find(config, "vocab_size") or 2 * _WORDS)


def waves(*shape: int) -> torch.Tensor:
    """Returns values in (-1, 1) that repeat nowhere and need no generator."""
    numel = torch.Size(shape).numel()
    return torch.sin(torch.arange(numel, dtype=torch.float64) * 0.7).to(torch.float32).view(shape)


def _find(config: Any, key: str) -> Any:
    """Returns the number or the sizes that the configuration has by this name, itself or in that of a part."""
    parts = ("text_config", "vision_config", "encoder", "decoder", "audio_config", "backbone_config")
    for part in (config, *(getattr(config, name, None) for name in parts)):
        value = getattr(part, key, None)
        if isinstance(value, int) or (isinstance(value, list | tuple) and value):
            return value
    return None
