# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Writes weights as Hugging Face names them: one file, or several of limited size and an index, tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


class LazyTensor:
    """A tensor of a checkpoint that is read by contiguous(): its shape and type are known before."""

    def __init__(self, shape: list[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self.shape, self.dtype, self._read = torch.Size(shape), dtype, read

    def contiguous(self) -> torch.Tensor:
        """The tensor, read now, in memory of its own."""
        return self._read()

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes of "5GB" (10^9 each), "500MiB" (2^20) or a number. Errors: ValueError."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", str(size).upper())
    try:
        count = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except (KeyError, ValueError):
        count = 0
    if count <= 0:
        raise ValueError(f'max_shard_size: got {size!r}, expected bytes such as "5GB", "500MiB" or 1000000')
    return count


def _bytes_of(tensor: LazyTensor) -> int:
    return tensor.numel() * tensor.element_size()


def split(state: Mapping[str, LazyTensor], most: int | None) -> list[dict[str, LazyTensor]]:
    """Parts of at most so many bytes, in the order of names; a larger tensor has a part of its own."""
    parts: list[dict[str, LazyTensor]] = [{}]
    held = 0
    for name, tensor in state.items():
        size = _bytes_of(tensor)
        if most is not None and parts[-1] and held + size > most:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += size
    return parts


def write(state: Mapping[str, LazyTensor], folder: str, most: int | None, safe: bool) -> list[str]:
    """Writes the files of `state`, the index last; returns their names.

    Memory: one tensor at a time as safetensors, the tensors of one file by torch.save.
    """
    parts = split(state, most)
    stem, end = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    several = len(parts) > 1
    names = [f"{stem}-{i:05d}-of-{len(parts):05d}{end}" if several else stem + end for i in range(1, len(parts) + 1)]
    os.makedirs(folder, exist_ok=True)
    for name, part in zip(names, parts, strict=True):
        path = os.path.join(folder, name)
        if safe:
            _write_safetensors(part, path)
        else:
            torch.save({key: tensor.contiguous() for key, tensor in part.items()}, path)
    if several:
        index = {
            "metadata": {"total_size": sum(map(_bytes_of, state.values()))},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        names.append(f"{stem}{end}.index.json")
        with open(os.path.join(folder, names[-1]), "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


def _write_safetensors(part: Mapping[str, LazyTensor], path: str) -> None:
    """The format: 8 bytes of length, a header of JSON, and the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(part.items(), key=lambda item: -item[1].element_size()):  # each on a multiple of its own
        begin, end = end, end + _bytes_of(tensor)
        kind = SAFETENSORS_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            if name != "__metadata__":
                file.write(part[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
