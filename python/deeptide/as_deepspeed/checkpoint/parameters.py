# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's marks on parameters (ds_id, ds_numel, …), zero.Init that makes them, and what libraries hook into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deeptide import zero
from deeptide._C import CommError
from deeptide.zero import ZeroParamStatus


def mark(parameters: Iterable[torch.Tensor], world_size: int = 1) -> None:
    """Gives parameters the attributes by which libraries know ZeRO-3: a reader always finds the whole value."""
    parameters = list(parameters)
    zero.number_parameters(parameters)
    for parameter in parameters:
        shard = -(-parameter.numel() // world_size)
        parameter.__dict__.update(
            ds_id=zero.place_of(parameter),
            ds_numel=parameter.numel(),
            ds_shape=parameter.shape,
            ds_status=ZeroParamStatus.AVAILABLE,
            ds_active_sub_modules=set(),
            partition_numel=lambda shard=shard: shard,
        )


def mark_model(model: torch.nn.Module, world_size: int) -> None:
    """Marks all parameters of a model, and its modules with what libraries call on them at stage 3."""
    mark(model.parameters(), world_size)
    for module in model.modules():
        module.__dict__.setdefault("ds_external_parameters", no_external_parameters)


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Whether it has these marks."""
    return "ds_id" in getattr(parameter, "__dict__", {})


def _contradicting_single_rank_pg_error(
    dp_world_size: int, explicit_process_group: object, env: Mapping[str, str | None] | None = None
) -> str | None:
    """Says why a default process group has one rank where the launcher started more; else None."""
    world = str((os.environ if env is None else env).get("WORLD_SIZE"))
    if dp_world_size != 1 or explicit_process_group is not None or not world.isdigit() or int(world) < 2:
        return None
    return (
        f"zero.Init: torch's default process group has 1 rank, but the launcher says WORLD_SIZE={world}: something "
        "made it for a world of one. Call deepspeed.init_distributed() before anything that makes a process group"
    )


class Init(zero.Init):
    """deeptide.zero.Init, with the default process group, which loading code expects, and the marks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from deeptide.as_deepspeed.initialize import init_distributed

        if kwargs.get("enabled", True):
            init_distributed()
            group = kwargs.get("data_parallel_group") or kwargs.get("sequence_data_parallel_group")
            wrong = _contradicting_single_rank_pg_error(dist.get_world_size(), group)
            if wrong:
                raise CommError(wrong)
        super().__init__(*args, **kwargs)

    def _take(self, parameters: Iterable[torch.Tensor]) -> None:
        mark(parameters)


def unchanged_constructor(fn: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """Tensors are made as torch makes them: Init changes no constructor."""
    return fn


@contextlib.contextmanager
def unwrap_model_for_generation(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the model; nothing has to be gathered for generate()."""
    yield getattr(model, "module", model)


class OnDevice(contextlib.ContextDecorator):
    """Inside, tensors are made on a device and in a type."""

    def __init__(self, dtype: torch.dtype | None, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = contextlib.ExitStack()
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        self._before = torch.get_default_dtype()
        if self.enabled:
            self._stack.enter_context(torch.device(self.device))
            if self.dtype is not None and self.dtype.is_floating_point:
                torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.set_default_dtype(self._before)
        self._stack.close()


class OffloadStandIn:
    """The object that trl takes off and puts back around generation at stage 3: lists of hooks, empty here."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.overflow = False

    def synced(self, core: object) -> contextlib.AbstractContextManager[None]:
        """No groups to keep equal."""
        return contextlib.nullcontext()

    def _register_deepspeed_module(self, module: torch.nn.Module) -> None:
        """Nothing to hook."""


def no_external_parameters() -> tuple[()]:
    """A module's ds_external_parameters()."""
    return ()
