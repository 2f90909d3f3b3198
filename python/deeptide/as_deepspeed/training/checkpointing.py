# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's activation checkpointing: torch's, in CPU memory or in parts on ranks that share layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from deeptide.as_deepspeed.helpers import groups
from deeptide.as_deepspeed.training import rng_tracker
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

_state = {"configured": False, "cpu": False, "partition": False}


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

    `mpu_` tells ranks' seeds apart; the rest has no effect. deepspeed_config: a dictionary or a path, whose
    "activation_checkpointing" says cpu_checkpointing and partition_activations; arguments win.
    """
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
    }
    for name, (argument, key) in given.items():
        value = section.get(key) if argument is None else argument
        if value is not None:
            _state[name] = bool(value)


def is_configured() -> bool:
    """Whether configure() was called."""
    return _state["configured"]


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """No buffer is sized by it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """The same as configure(partition_activations=…)."""
    _state["partition"] = bool(partition_activation)


def _place() -> contextlib.AbstractContextManager[Any]:
    """Around a checkpoint: where its arguments are kept."""
    team = groups.team if _state["partition"] else None
    if team is not None and team.size > 1:
        from deeptide.tensor.kept import partitioned

        return partitioned(team, _state["cpu"])
    return torch.autograd.graph.save_on_cpu() if _state["cpu"] else contextlib.nullcontext()


def _run(function: Callable[..., Any], args: tuple[Any, ...], use_reentrant: bool) -> Any:
    with _place():
        return torch.utils.checkpoint.checkpoint(rng_tracker.repeatable(function), *args, use_reentrant=use_reentrant)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), whose activations backward computes again."""
    return _run(function, args, use_reentrant=True)


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
