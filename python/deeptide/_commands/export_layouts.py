# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in layouts with optimizer states that torch writes: DeepSpeed's universal one and torch's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from deeptide._C import CheckpointError, CheckpointReader, CheckpointTensor, find_optimizer

_Progress = Callable[[int, int], None]
_DS_VERSION = "0.19.8"  # whose loader was read for this layout
_SHARED = "buffer"  # the first rank's
_BLOCK = 1 << 20  # elements that are read at once


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


def _param_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Hyper-parameters under torch's keys, by parameter group; without the parameters."""
    info = find_optimizer(state["optimizer"]) if "optimizer" in state else None
    groups = []
    for saved in state.get("groups", []):
        group: dict[str, Any] = {"params": []}
        for number in info.hyperparameters if info else []:
            if number.name not in saved:
                continue
            if number.element < 0:
                group[number.group_key] = saved[number.name]
            else:
                values = list(group.get(number.group_key, ()))
                group[number.group_key] = (*values, saved[number.name])
        groups.append(group)
    return groups


# -- DeepSpeed's universal layout -----------------------------------------------------------------------------------


def _save(value: object, *path: str) -> None:
    os.makedirs(os.path.join(*path[:-1]), exist_ok=True)
    torch.save(value, os.path.join(*path))


def _save_with(reader: CheckpointReader, tensors: list[CheckpointTensor], state: dict[str, Any], path: str) -> None:
    """Saves `state` with the tensors under "module": torch leaves room for them, and blocks of values fill it."""
    module = {}  # torch.empty touches no page
    for tensor in tensors:
        module[tensor.name] = torch.empty(tensor.shape, dtype=reader.read_range(tensor, 0, 0).dtype)
    with torch.serialization.skip_data():
        torch.save({"module": module, **state}, path)
    places: Any = torch._C.PyTorchFileReader(path)
    with open(path, "r+b") as file:
        for number, tensor in enumerate(tensors):  # as torch numbers them: nothing else in the file is a tensor
            file.seek(places.get_record_offset(f"data/{number}"))
            for begin in range(0, tensor.numel, _BLOCK):
                values = reader.read_range(tensor, begin, min(begin + _BLOCK, tensor.numel))
                file.write(values.view(torch.uint8).numpy().data)


def _model_states(reader: CheckpointReader, state: dict[str, Any]) -> dict[str, Any]:
    """The values that DeepSpeed reads beside the tensors: counters, schedule, the program's own state."""
    client_state = json.loads(reader.client_state_json)
    client_state.pop("__deeptide__", None)
    return {
        **client_state,
        "optimizer": None,
        "lr_scheduler": {"last_batch_iteration": state.get("schedule_iteration", -1)},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": state.get("skipped_steps", 0),
        "global_steps": state["global_steps"],
        "global_samples": state.get("global_samples", 0),
        "dp_world_size": reader.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _DS_VERSION,
    }


def export_universal(reader: CheckpointReader, out: str, progress: _Progress | None) -> list[str]:
    """DeepSpeed's universal checkpoint in `out`: `checkpoint.load_universal` reads it at any stage.

    Frozen weights lie in the module's state, as buffers do. No loss scale is in it: it starts from its configuration.
    """
    state = json.loads(reader.state_json)
    tag = os.path.basename(os.path.normpath(reader.folder))
    folder = os.path.join(out, tag)
    steps = torch.tensor(float(state.get("optimizer_steps", 0)))
    tensors = _of_weights(reader)
    meter = _Meter(progress, tensors)
    module = [tensor for tensor in tensors if tensor.role in (_SHARED, "param")]  # trained weights come from zero/
    for tensor in tensors:
        if tensor.role not in (_SHARED, "param"):
            values = reader.read(tensor)
            name = "fp32" if tensor.role == "master" else tensor.role
            values = values.float() if tensor.role == "master" else values
            _save({"param": values, "cat_dim": 0}, folder, "zero", tensor.name, f"{name}.pt")
            if tensor.role == "master":
                _save(steps, folder, "zero", tensor.name, "step.pt")
        meter.add(tensor)
    groups = _param_groups(state)
    of_zero = {
        "zero_stage": state.get("zero_stage", 0),
        "partition_count": [reader.world_size] * len(groups),
        "overflow": False,
        "ds_version": _DS_VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": groups},
    }
    _save(of_zero, folder, "zero", "optimizer_state.pt")
    model_states = {
        **_model_states(reader, state),
        "buffer_names": [tensor.name for tensor in tensors if tensor.role == _SHARED],
        "param_shapes": [{tensor.name: torch.Size(tensor.shape) for tensor in tensors if tensor.role == "master"}],
    }
    path = os.path.join(folder, "mp_rank_00_model_states.pt")  # its name at stages below 3
    _save_with(reader, module, model_states, path)
    shutil.copyfile(path, os.path.join(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt"))  # and at stage 3
    for latest in ("latest_universal", "latest"):
        with open(os.path.join(out, latest), "w", encoding="utf-8") as file:
            file.write(tag)
    return [tag, "latest_universal"]


# -- torch's distributed checkpoint -----------------------------------------------------------------------------------


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


def export_dcp(reader: CheckpointReader, out: str, progress: _Progress | None) -> list[str]:
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
    groups = _param_groups(state)
    for tensor in reader.tensors:
        if tensor.role != "master":
            continue
        content[f"optim.state.{tensor.name}.step"] = steps
        for key, value in groups[0].items() if groups else ():
            if key != "params":
                content[f"optim.param_groups.{tensor.name}.{key}"] = value
    planner = _ReadLater(reader, tensors, _Meter(progress, list(tensors.values())))
    writer = dcp.FileSystemWriter(out, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise next(iter(error.failures.values()))[0] from error
    return sorted(os.listdir(out))


def export(layout: str, reader: CheckpointReader, out: str, progress: _Progress | None) -> list[str]:
    """Writes "universal" or "dcp". Errors: CheckpointError, also where torch could not write."""
    try:
        return {"universal": export_universal, "dcp": export_dcp}[layout](reader, out, progress)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer of archives raises RuntimeError on a full drive
        raise CheckpointError(f"cannot export to {out}: {error}; check the folder and the room on its drive") from error
