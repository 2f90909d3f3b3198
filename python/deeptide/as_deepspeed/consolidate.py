# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Whole weights: of a running engine, and of a checkpoint folder under the names of DeepSpeed's zero_to_fp32.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from deeptide._C import CheckpointError
from deeptide.as_deepspeed.weight_files import SAFETENSORS_NAMES, LazyTensor, parse_size, write

if TYPE_CHECKING:
    from deeptide.as_deepspeed.engine import DeepSpeedEngine

_SCRIPT = """#!/usr/bin/env python
# Writes the whole fp32 weights of the checkpoint in this folder: python zero_to_fp32.py . output_folder
from deeptide.as_deepspeed.consolidate import main

if __name__ == "__main__":
    main()
"""
_SAFETENSORS = ".safetensors"
_TYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def write_script(save_dir: Any) -> None:
    """Puts zero_to_fp32.py, which DeepSpeed's users look for, into a folder of checkpoints."""
    path = os.path.join(os.fspath(save_dir), "zero_to_fp32.py")
    with contextlib.suppress(OSError):  # what is wrong with the folder, the save says on every rank
        os.makedirs(save_dir, exist_ok=True)
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(_SCRIPT)


# -- of an engine -------------------------------------------------------------------------------------------------


def whole_weights(engine: DeepSpeedEngine, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """{name: tensor} on the CPU of rank 0, None on the others; the names of a tied parameter share one tensor."""
    state = engine.whole_state(only_rank=0)
    if engine.global_rank != 0:
        return None
    first: dict[int, str] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if exclude_frozen and not parameter.requires_grad:
            state.pop(name, None)
        elif name in state:
            known = first.setdefault(id(parameter), name)
            state[name] = state[known]
    return dict(state)


def save_weights(engine: DeepSpeedEngine, save_dir: Any, filename: str, exclude_frozen: bool) -> None:
    """One file of whole weights, by rank 0. Collective. Raises ImportError if the format has no package here."""
    if filename.endswith(_SAFETENSORS):
        _safetensors()  # on all ranks, before one waits for another
    state = whole_weights(engine, exclude_frozen)
    if state is None:
        return
    os.makedirs(save_dir, exist_ok=True)
    _write(state, os.path.join(os.fspath(save_dir), filename))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError(
            f"a file that ends in {_SAFETENSORS} needs the package safetensors: pip install safetensors, "
            "or choose another ending, which torch.save writes"
        ) from error
    return safetensors.torch


def _write(state: dict[str, torch.Tensor], path: str) -> None:
    if path.endswith(_SAFETENSORS):
        # The format knows no shared memory: each name has its own.
        own = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        _safetensors().save_file(own, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


# -- of a checkpoint ----------------------------------------------------------------------------------------------


def _folder_of(checkpoint_dir: Any, tag: str | None) -> str:
    directory = os.fspath(checkpoint_dir)
    if tag is None:
        latest = os.path.join(directory, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"{latest} does not exist: give the tag, or the folder that save_checkpoint was given")
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    folder = os.path.join(directory, tag)
    if not os.path.isfile(os.path.join(folder, "manifest.json")):
        raise FileNotFoundError(f"{folder} holds no checkpoint of Deeptide's: there is no manifest.json")
    return folder


def _read_tensor(folder: str, entry: dict[str, Any]) -> torch.Tensor:
    """One tensor out of its pieces: boxes of it, or, where an offset stands alone, runs of its elements in order."""
    dtype = _TYPES[entry["dtype"]]
    shape = entry["shape"]
    whole = torch.empty(shape, dtype=dtype)
    for piece in entry["pieces"]:
        offsets, sizes = piece["offsets"], piece["sizes"]
        count = 1
        for size in sizes:
            count *= size
        values = torch.from_file(
            os.path.join(folder, piece["file"]), size=_bytes_needed(piece["offset"], count, dtype), dtype=torch.uint8
        )[piece["offset"] :].clone()
        part = values.view(dtype).reshape(sizes)
        if len(sizes) == len(shape) and len(shape) > 1:
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = part
        else:
            whole.view(-1)[offsets[0] : offsets[0] + sizes[0]] = part
    return whole


def _bytes_needed(offset: int, count: int, dtype: torch.dtype) -> int:
    return offset + count * dtype.itemsize


def _entries(folder: str) -> list[dict[str, Any]]:
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    if manifest.get("version") != 2:
        raise CheckpointError(
            f"{folder}: version {manifest.get('version')} of the format, expected 2; load it in an engine and save anew"
        )
    tensors: list[dict[str, Any]] = manifest["tensors"]
    return tensors


def _lazy(folder: str, entry: dict[str, Any]) -> LazyTensor:
    """Weights of any floating type become fp32; buffers stay."""
    dtype = _TYPES[entry["dtype"]]
    kind = torch.float32 if entry["role"] != "buffer" and dtype.is_floating_point else dtype
    return LazyTensor(entry["shape"], kind, lambda: _read_tensor(folder, entry).to(kind))


def _lazy_state(checkpoint_dir: Any, tag: str | None, exclude_frozen: bool) -> dict[str, LazyTensor]:
    folder = _folder_of(checkpoint_dir, tag)
    masters: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for entry in _entries(folder):
        if entry["role"] == "master":
            masters[entry["name"]] = entry
        elif entry["role"] == "param" or (entry["role"] == "buffer" and not entry.get("coordinates")):
            others.setdefault(entry["name"], entry)
    if exclude_frozen:  # a frozen parameter has no master
        others = {name: entry for name, entry in others.items() if entry["role"] != "param"}
    return {name: _lazy(folder, entry) for name, entry in {**others, **masters}.items()}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """{name: tensor} of a checkpoint on the CPU, in fp32 where it is trained; needs no engine and no ranks.

    With lazy_mode the values are read one by one, each by its contiguous(). A tied parameter has its first name only.
    Errors: ValueError without `latest` and tag, FileNotFoundError.
    """
    state = _lazy_state(checkpoint_dir, tag, exclude_frozen_parameters)
    return dict(state) if lazy_mode else {name: tensor.contiguous() for name, tensor in state.items()}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: Any, tag: str | None = None
) -> torch.nn.Module:
    """Loads a checkpoint's whole weights into a plain model, moves it to the CPU and returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's whole fp32 weights into `output_dir`: files of at most `max_shard_size`, with an index.

    One file where all fit, or with None. Memory: one tensor as safetensors, else one file. Errors: ValueError.
    """
    most = None if max_shard_size is None else parse_size(max_shard_size)
    state = _lazy_state(checkpoint_dir, tag, exclude_frozen_parameters)
    write(state, os.fspath(output_dir), most, safe_serialization)


def main() -> None:
    """The command line of zero_to_fp32.py."""
    parser = argparse.ArgumentParser(description="Writes whole fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="where to write")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file at most, such as 5GB or 500MiB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch.save")
    parser.add_argument("-t", "--tag", help="the checkpoint; else the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen ones out")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )
