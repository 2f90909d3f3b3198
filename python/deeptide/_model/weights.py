# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Loads what others saved: weights of Hugging Face folders, checkpoints of DeepSpeed."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from deeptide import _C
from deeptide._model.names import namer


class LoadedWeights(NamedTuple):
    """The names that only one side has: of the model's parameters and buffers, and of the file's tensors."""

    missing: list[str]
    unexpected: list[str]


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadedWeights:
    """Copies tensors of a file, or of a folder of `save_pretrained`, into parameters and buffers of equal names.

    Reads safetensors and torch's zip format (`pytorch_model.bin`), one file or several with their index, and runs no
    code that a pickle names. Call it before `initialize`; under `zero.Init` nothing is read before that, and then unit
    by unit. Raises CheckpointError on other shapes, with nothing copied; with `strict`, also on names that one side
    lacks. A parameter that is tied to a loaded one is not missing.
    """
    targets = list(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                targets.append((f"{prefix}.{name}" if prefix else name, buffer))
    plain = namer(model)
    targets = [(plain(name), tensor) for name, tensor in targets]
    return LoadedWeights(*_C.load_weights(targets, os.fspath(path), strict))


def import_checkpoint(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], source_tag: str = "", tag: str = ""
) -> str:
    """Writes what others saved as a checkpoint of Deeptide's, directory/tag; returns that folder.

    `source`: a folder of DeepSpeed's checkpoints, or one of them. Reads ZeRO stages 0 to 3, pipelines and the universal
    form: masters, optimizer states, steps, learning rates, loss scale, schedule and client state. Without `source_tag`
    it is the one that `latest_universal` or `latest` names. Or weights alone: a folder of `save_pretrained`, or a file
    of safetensors or torch.save; `tag` is then "weights" by default, and load_optimizer_states=False loads it. Needs
    neither the model nor a group, and little memory; nothing in a file is run. Raises CheckpointError.
    """
    return _C.import_checkpoint(os.fspath(source), os.fspath(directory), source_tag, tag)
