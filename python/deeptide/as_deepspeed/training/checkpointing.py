# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's activation checkpointing: torch's, in CPU memory, in buffers, or in parts on ranks that share layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from deeptide._model.recomputation import repeatable
from deeptide.as_deepspeed.helpers import groups
from deeptide.as_deepspeed.training import boundaries, rng_tracker
from deeptide.as_deepspeed.training.argument_rows import ArgumentRows
from deeptide.as_deepspeed.training.rng_tracker import (
    RngTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)

__all__ = [
    "CheckpointFunction",
    "RngTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_state = {
    "configured": False,
    "cpu": False,
    "partition": False,
    "contiguous": False,
    "synchronize": False,
    "profile": False,
}
_number: int | None = None  # of checkpoints that keep their arguments at once
_rows: ArgumentRows | None = None


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """checkpoint_in_cpu keeps activations in CPU memory, partition_activations a part of them on each rank of a team.

    contiguous_checkpointing keeps them in buffers that are made once, with room for num_checkpoints at a time.
    synchronize waits for the device at the begin and end of each checkpoint's forward and backward; profile logs how
    long they took, in ms. `mpu_` tells ranks' seeds apart. deepspeed_config: a dictionary or a path, whose
    "activation_checkpointing" has these by its own names; arguments win.

    Errors: ValueError if contiguous_checkpointing has no num_checkpoints.
    """
    global _number
    _state["configured"] = True
    if mpu_ is not None:
        rng_tracker.mpu = mpu_
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        from deeptide.as_deepspeed.config.configuration import as_dict

        section = as_dict(deepspeed_config).get("activation_checkpointing", {})
    given = {
        "cpu": (checkpoint_in_cpu, "cpu_checkpointing"),
        "partition": (partition_activations, "partition_activations"),
        "contiguous": (contiguous_checkpointing, "contiguous_memory_optimization"),
        "synchronize": (synchronize, "synchronize_checkpoint_boundary"),
        "profile": (profile, "profile"),
    }
    for name, (argument, key) in given.items():
        value = section.get(key) if argument is None else argument
        if value is not None:
            _state[name] = bool(value)
    number = section.get("number_checkpoints") if num_checkpoints is None else num_checkpoints
    if number is not None:
        set_num_layers(number)
    if _state["contiguous"] and not _number:
        _state["contiguous"] = False
        raise ValueError(
            "configure: contiguous_checkpointing needs num_checkpoints, the number of checkpointed calls whose "
            f"arguments are kept at once, got {_number}: give it, as of the layers in one forward"
        )


def is_configured() -> bool:
    """Whether configure() was called."""
    return _state["configured"]


def reset() -> None:
    """Drops the buffers of contiguous_checkpointing."""
    global _rows
    _rows = None


def set_num_layers(nlayers: int) -> None:
    """The same as configure(num_checkpoints=…)."""
    global _number
    _number = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """The same as configure(partition_activations=…)."""
    _state["partition"] = bool(partition_activation)


def _begun_rows() -> ArgumentRows | None:
    """The buffers of contiguous_checkpointing, at the begin of a checkpoint."""
    global _rows
    if not _state["contiguous"] or not _number:
        return None
    if _rows is None or _rows.number != _number:
        _rows = ArgumentRows(_number)
    _rows.begin()
    return _rows


def _place() -> contextlib.AbstractContextManager[Any]:
    """Around a checkpoint: where its arguments are kept."""
    team = groups.team if _state["partition"] else None
    rows = _begun_rows()
    if team is not None and team.size > 1:
        from deeptide.tensor.kept import partitioned

        return partitioned(team, _state["cpu"], None if rows is None else rows.keep)
    if rows is not None:
        return rows.hooks(_state["cpu"])
    return torch.autograd.graph.save_on_cpu() if _state["cpu"] else contextlib.nullcontext()


def _run(function: Callable[..., Any], args: tuple[Any, ...], use_reentrant: bool) -> Any:
    synchronizes, profiles = _state["synchronize"], _state["profile"]
    is_watched = synchronizes or profiles
    with boundaries.forward(synchronizes, profiles) if is_watched else contextlib.nullcontext(), _place():
        outputs = torch.utils.checkpoint.checkpoint(repeatable(function), *args, use_reentrant=use_reentrant)
    if is_watched:
        boundaries.watch_backward(outputs, args, use_reentrant, synchronizes, profiles)
    return outputs


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations backward computes again."""
    if not kwargs:
        return _run(function, args, use_reentrant=True)

    def by_place(*given: Any) -> Any:  # a reentrant checkpoint gives gradients to what it is given by place
        return function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    return _run(by_place, (*args, *kwargs.values()), use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same, by torch's newer way: the arguments need not require a gradient."""
    return _run(function, args, use_reentrant=False)


class CheckpointFunction:
    """For code that calls CheckpointFunction.apply itself."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        """Appends the outputs to `all_outputs`, as DeepSpeed's does."""
        outputs = checkpoint(function, *args)
        all_outputs += list(outputs) if isinstance(outputs, tuple) else [outputs]
