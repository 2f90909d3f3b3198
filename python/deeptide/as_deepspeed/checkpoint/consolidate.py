# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Whole weights: of a running engine, and of a checkpoint folder under the names of DeepSpeed's zero_to_fp32.py."""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import re
import stat
from typing import TYPE_CHECKING, Any

import torch

from deeptide import checkpoint
from deeptide._C import CheckpointReader
from deeptide._model.extra_state import read_extra_states
from deeptide._model.names import namer
from deeptide.as_deepspeed.helpers.logging import logger

if TYPE_CHECKING:
    from deeptide.as_deepspeed.engine import DeepSpeedEngine

_SCRIPT = """#!/usr/bin/env python
# Writes the whole fp32 weights of the checkpoint in this folder: python zero_to_fp32.py . output_folder
from deeptide.as_deepspeed.checkpoint.consolidate import main

if __name__ == "__main__":
    main()
"""
_SAFETENSORS = ".safetensors"
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "BOOL": "bool",
}


def write_script(save_dir: Any) -> None:
    """Puts zero_to_fp32.py, which DeepSpeed's users look for, into a folder of checkpoints."""
    path = os.path.join(os.fspath(save_dir), "zero_to_fp32.py")
    with contextlib.suppress(OSError):  # what is wrong with the folder, the save says on every rank
        os.makedirs(save_dir, exist_ok=True)
        if not os.path.exists(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(_SCRIPT)
            make_executable(path)


def make_executable(path: Any) -> None:
    """So that the script runs as a command; on a share that has no permissions it is only said."""
    try:
        os.chmod(path, os.stat(path).st_mode | stat.S_IEXEC)
    except (FileNotFoundError, PermissionError) as error:
        logger.info(f"could not change permissions of {path}: {error}; it is kept as it is")


# -- of an engine -------------------------------------------------------------------------------------------------


def whole_weights(engine: DeepSpeedEngine, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """{name: tensor} on the CPU of rank 0, None on the others; the names of a tied parameter share one tensor."""
    state: dict[str, Any] = engine.whole_state_dict(exclude_frozen)
    extra = read_extra_states(engine.module)  # on every rank: it may use parameters
    if engine.global_rank != 0:
        return None
    for name, value in extra.items():
        state[name] = value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
    first: dict[int, str] = {}
    plain = namer(engine.module)
    for given, parameter in engine.module.named_parameters(remove_duplicate=False):
        name = plain(given)
        if exclude_frozen and not parameter.requires_grad:  # also what was frozen since initialize
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


class LazyTensor:
    """A tensor of a checkpoint that is read by contiguous(): its shape and type are known before."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        self._reader, self._tensor = reader, reader.find(name)
        saved = getattr(torch, _TYPES[self._tensor.dtype])
        trained = self._tensor.role in ("master", "param") and saved.is_floating_point
        self.shape, self.dtype = torch.Size(self._tensor.shape), torch.float32 if trained else saved

    def contiguous(self) -> torch.Tensor:
        """The tensor, read now, in memory of its own."""
        return self._reader.read(self._tensor).to(self.dtype)

    def size(self, dim: int | None = None) -> Any:
        """The size, like a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize


def _is_checkpoint(folder: str) -> bool:
    if not os.path.isdir(folder):
        return False
    return any(name == "manifest.json" or name.endswith("model_states.pt") for name in os.listdir(folder))


def get_checkpoint_files(checkpoint_dir: Any, glob_pattern: str) -> list[str]:
    """Files of a pattern in a folder, those of a higher number after others. Errors: FileNotFoundError without any."""
    found = glob.glob(os.path.join(checkpoint_dir, glob_pattern))
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def get_optim_files(checkpoint_dir: Any) -> list[str]:
    """DeepSpeed's files of optimizer states in a folder of its own checkpoint."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: Any) -> list[str]:
    """Its files of the model."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: Any, zero_stage: int) -> str:
    """The file of rank 0's model. Errors: FileNotFoundError without one."""
    name = f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt"
    path = os.path.join(checkpoint_dir, name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


def _open(checkpoint_dir: Any, tag: str | None) -> CheckpointReader:
    folder = os.fspath(checkpoint_dir)
    if tag is None and not os.path.isfile(os.path.join(folder, "latest")):
        raise ValueError(f"{folder}/latest does not exist: give the tag, or the folder that save_checkpoint was given")
    if tag is not None and not _is_checkpoint(os.path.join(folder, tag)):
        raise FileNotFoundError(
            f"{folder}/{tag} holds no checkpoint: there is no manifest.json, nor DeepSpeed's *_model_states.pt"
        )
    return CheckpointReader(folder, tag or "")


def _names(reader: CheckpointReader, exclude_frozen: bool) -> list[str]:
    """Weights, and buffers of the first rank; a parameter without a master is frozen."""
    roles: dict[str, set[str]] = {}
    for tensor in reader.tensors:
        roles.setdefault(tensor.name, set()).add(tensor.role)
    wanted = {"master", "buffer"} if exclude_frozen else {"master", "param", "buffer"}
    return [name for name, found in roles.items() if found & wanted]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """{name: tensor} of a checkpoint on the CPU, in fp32 where it is trained; needs no engine and no ranks.

    With lazy_mode the values are read one by one, each by its contiguous(). A tied parameter has its first name only.
    Errors: ValueError without `latest` and tag, FileNotFoundError.
    """
    reader = _open(checkpoint_dir, tag)
    state = {name: LazyTensor(reader, name) for name in _names(reader, exclude_frozen_parameters)}
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

    One file where all fit, or with None. Memory: some 32 MiB. Errors: ConfigError, which is a ValueError.
    """
    checkpoint.export(
        _open(checkpoint_dir, tag),
        output_dir,
        "safetensors" if safe_serialization else "state_dict",
        dtype="fp32",
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


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
