# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as folders: reads, verifies, compares, exports and prunes them without engine, group or accelerator.

`deeptide checkpoint` does the same from a shell. A folder is the one that save_checkpoint was given, or a checkpoint in
it; without a tag the latest is meant.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator

from deeptide import _C
from deeptide._C import (
    CheckpointDifference,
    CheckpointReader,
    CheckpointStatistics,
    CheckpointSummary,
    CheckpointTensor,
    ConfigError,
)

__all__ = [
    "CheckpointDifference",
    "CheckpointReader",
    "CheckpointStatistics",
    "CheckpointSummary",
    "CheckpointTensor",
    "diff",
    "export",
    "ls",
    "open",
    "prune",
    "statistics",
    "verify",
]

_Folder = str | os.PathLike[str]
_Progress = Callable[[int, int], None]
_FORMATS = _C.ExportFormat.__members__


@contextlib.contextmanager
def _bar(what: str) -> Iterator[_Progress | None]:
    """A bar of tqdm's, where that is installed and standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        yield None
        return
    with tqdm(desc=what, unit="B", unit_scale=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def open(folder: _Folder, tag: str | None = None) -> CheckpointReader:
    """Opens a checkpoint: `reader.tensors`, `reader.find(name, role)`, `reader.read(tensor)`, `reader.read_range(…)`.

    Errors: CheckpointError when it is missing, truncated or malformed.
    """
    return CheckpointReader(os.fspath(folder), tag or "")


def ls(folder: _Folder) -> list[CheckpointSummary]:
    """The checkpoints in a folder, by steps, then by time."""
    return _C.list_checkpoints(os.fspath(folder))


def statistics(reader: CheckpointReader, tensor: CheckpointTensor) -> CheckpointStatistics:
    """Least, most, mean and norm of a tensor's finite elements, its first elements, and how many are not finite."""
    return _C.checkpoint_statistics(reader, tensor)


def verify(folder: _Folder, tag: str | None = None) -> list[str]:
    """Reads every byte and returns a line per fault, which names the tensor; empty when the checkpoint is whole."""
    with _bar("verify") as progress:
        return _C.verify_checkpoint(os.fspath(folder), tag or "", progress)


def diff(first: CheckpointReader | _Folder, second: CheckpointReader | _Folder) -> list[CheckpointDifference]:
    """The differences between two checkpoints, tensor by tensor; empty when all are equal."""
    one, other = (item if isinstance(item, CheckpointReader) else open(item) for item in (first, second))
    with _bar("compare") as progress:
        return _C.compare_checkpoints(one, other, progress)


def export(
    folder: CheckpointReader | _Folder,
    out: _Folder,
    format: str = "safetensors",
    *,
    tag: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str | None = "5GB",
    exclude_frozen: bool = False,
) -> list[str]:
    """Writes a checkpoint for other programs and returns the names of the files written, block by block.

    format: "safetensors" (model.safetensors, as Transformers reads it), "state_dict" (pytorch_model.bin, as torch.load
    reads it); with optimizer states "universal" (DeepSpeed's) and "dcp" (torch.distributed.checkpoint). The first two
    take dtype ("fp32", "bf16", "fp16"; None: as saved), the bytes of a file at most, and leave frozen parameters out by
    choice. A tied parameter is there once, under its first name. Memory: 32 MiB.
    Errors: ConfigError, CheckpointError.
    """
    reader = folder if isinstance(folder, CheckpointReader) else open(folder, tag)
    if format not in _FORMATS:
        raise ConfigError(f"export: got format {format!r}, expected one of {', '.join(_FORMATS)}")
    size = "" if max_shard_size is None else str(max_shard_size)
    with _bar("export") as progress:
        return _C.export_checkpoint(
            reader, os.fspath(out), _FORMATS[format], dtype or "", size, exclude_frozen, progress
        )


def prune(folder: _Folder, keep_last: int, keep_every: int = 0, dry_run: bool = False) -> list[str]:
    """Removes checkpoints and returns their tags.

    Keeps the `keep_last` of most steps, those whose steps are multiples of `keep_every`, the one that `latest` names,
    and whatever cannot be read.
    """
    return _C.prune_checkpoints(os.fspath(folder), keep_last, keep_every, dry_run)
