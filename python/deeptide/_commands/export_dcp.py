# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Exports checkpoints with optimizer states in the layout of torch.distributed.checkpoint, by torch's own writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from deeptide._C import CheckpointError, CheckpointReader, CheckpointTensor, param_groups_json

_Progress = Callable[[int, int], None]
_SHARED = "buffer"  # the first rank's


class _Meter:
    """Tells how far an export is."""

    def __init__(self, progress: _Progress | None, tensors: list[CheckpointTensor]) -> None:
        self._progress, self._done, self._total = progress, 0, sum(tensor.bytes for tensor in tensors)

    def add(self, tensor: CheckpointTensor) -> None:
        self._done += tensor.bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _of_weights(reader: CheckpointReader) -> list[CheckpointTensor]:
    """Weights, moments and the first rank's buffers; of a parameter with a master not the copy that computed."""
    trained = {tensor.name for tensor in reader.tensors if tensor.role == "master"}
    return [
        tensor
        for tensor in reader.tensors
        if not tensor.role.startswith("buffer.") and not (tensor.role == "param" and tensor.name in trained)
    ]


class _ReadLater(dcp.DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when it is written."""

    def __init__(self, reader: CheckpointReader, tensors: dict[str, CheckpointTensor], meter: _Meter) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader, self._tensors, self._meter = reader, tensors, meter
        self._written = torch.empty(0)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a tensor of the checkpoint; anything else as it was given."""
        tensor = self._tensors.get(index.fqn)
        if tensor is None:
            return super().lookup_object(index)
        self._written.untyped_storage().resize_(0)  # torch keeps each one until all are written
        self._written = self._reader.read(tensor)
        return self._written

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Counts, and does as the base class."""
        data = super().resolve_data(write_item)
        if write_item.index.fqn in self._tensors:
            self._meter.add(self._tensors[write_item.index.fqn])
        return data


def _write(reader: CheckpointReader, out: str, progress: _Progress | None) -> list[str]:
    """Writes `model.<name>` and `optim.state.<name>.<state>`, as its get_state_dict names them.

    Beside them `optim.state.<name>.step` and the hyper-parameters `optim.param_groups.<name>.<key>` of the first group.
    """
    state = json.loads(reader.state_json)
    tensors = {}
    for tensor in _of_weights(reader):
        moment = tensor.role not in ("master", "param", _SHARED)
        tensors[f"optim.state.{tensor.name}.{tensor.role}" if moment else f"model.{tensor.name}"] = tensor
    content: dict[str, Any] = {}
    for name, tensor in tensors.items():
        empty = reader.read_range(tensor, 0, 0)
        content[name] = torch.empty(tensor.shape, dtype=empty.dtype, device="meta")
    steps = torch.tensor(float(state.get("optimizer_steps", 0)))
    groups = json.loads(param_groups_json(reader))
    for tensor in reader.tensors:
        if tensor.role != "master":
            continue
        content[f"optim.state.{tensor.name}.step"] = steps
        for key, value in groups[0].items() if groups else ():
            content[f"optim.param_groups.{tensor.name}.{key}"] = tuple(value) if isinstance(value, list) else value
    planner = _ReadLater(reader, tensors, _Meter(progress, list(tensors.values())))
    writer = dcp.FileSystemWriter(out, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise next(iter(error.failures.values()))[0] from error
    return sorted(os.listdir(out))


def export(reader: CheckpointReader, out: str, progress: _Progress | None) -> list[str]:
    """Writes the checkpoint to the folder `out`. Errors: CheckpointError, also where torch could not write."""
    try:
        return _write(reader, out, progress)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer of archives raises RuntimeError on a full drive
        raise CheckpointError(f"cannot export to {out}: {error}; check the folder and the room on its drive") from error
