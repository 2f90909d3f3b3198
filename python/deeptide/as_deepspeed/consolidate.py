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

if TYPE_CHECKING:
    from deeptide.as_deepspeed.engine import DeepSpeedEngine

_SCRIPT = """#!/usr/bin/env python
# Writes the whole fp32 weights of the checkpoint in this folder: python zero_to_fp32.py . output_folder
from deeptide.as_deepspeed.consolidate import main

if __name__ == "__main__":
    main()
"""
_SAFETENSORS = ".safetensors"
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


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
        _safetensors().save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, path)
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


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """{name: tensor} of a checkpoint on the CPU, in fp32 where it is trained; needs no engine and no ranks.

    A tied parameter has its first name only. Errors: ValueError without `latest` and tag, FileNotFoundError.
    """
    folder = _folder_of(checkpoint_dir, tag)
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    if manifest.get("version") != 2:
        raise CheckpointError(
            f"{folder}: version {manifest.get('version')} of the format, expected 2; load it in an engine and save anew"
        )
    masters: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for entry in manifest["tensors"]:
        if entry["role"] == "master":
            masters[entry["name"]] = entry
        elif entry["role"] == "param" or (entry["role"] == "buffer" and not entry.get("coordinates")):
            others.setdefault(entry["name"], entry)
    if exclude_frozen_parameters:  # a frozen parameter has no master
        others = {name: entry for name, entry in others.items() if entry["role"] != "param"}
    chosen = {**others, **masters}
    state = {name: _read_tensor(folder, entry) for name, entry in chosen.items()}
    return {
        name: t.float() if chosen[name]["role"] != "buffer" and t.is_floating_point() else t
        for name, t in state.items()
    }


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
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's whole fp32 weights to one file in `output_dir`, whatever max_shard_size says."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    os.makedirs(output_dir, exist_ok=True)
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    _write(state, os.path.join(os.fspath(output_dir), name))


def main() -> None:
    """The command line of zero_to_fp32.py."""
    parser = argparse.ArgumentParser(description="Writes whole fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint was given")
    parser.add_argument("output_dir", help="where to write")
    parser.add_argument("--max_shard_size", default="5GB", help="accepted; one file is written")
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
