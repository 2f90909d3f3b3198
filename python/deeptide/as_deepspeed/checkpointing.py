# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's activation checkpointing: torch's, with the few settings that torch has too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint

from deeptide.as_deepspeed import NotSupportedError

_state = {"configured": False, "cpu": False}


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
    """checkpoint_in_cpu keeps activations in CPU memory; the rest has no effect where ranks share no model.

    deepspeed_config: a dictionary or a path, whose "activation_checkpointing" says cpu_checkpointing; arguments win.
    """
    _state["configured"] = True
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        from deeptide.as_deepspeed.configuration import as_dict

        config = as_dict(deepspeed_config)
        checkpoint_in_cpu = config.get("activation_checkpointing", {}).get("cpu_checkpointing")
    if checkpoint_in_cpu is not None:
        _state["cpu"] = bool(checkpoint_in_cpu)


def is_configured() -> bool:
    """Whether configure() was called."""
    return _state["configured"]


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """No buffer is sized by it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """There are no model-parallel ranks to share them out to."""


def _run(function: Callable[..., Any], args: tuple[Any, ...], use_reentrant: bool) -> Any:
    place = torch.autograd.graph.save_on_cpu() if _state["cpu"] else contextlib.nullcontext()
    with place:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant)


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


class RngTracker:
    """Megatron's tracker of generators for model-parallel ranks: with one rank a model, torch's own state serves."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        """Forgets the states."""
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Sets them."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds one."""
        self.states_[name] = seed

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Nothing to switch to."""
        yield


_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """The one tracker."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds torch."""
    torch.manual_seed(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> NoReturn:
    """For tensor parallelism."""
    raise NotSupportedError("model_parallel_reconfigure_tp_seed: there is no tensor parallelism yet")
