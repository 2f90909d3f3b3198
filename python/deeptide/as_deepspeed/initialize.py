# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.initialize and deepspeed.init_distributed."""

from __future__ import annotations

import datetime
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._engine.initialize import cut, groups_of_stages, is_pipeline, make_engine, tuned
from deeptide._model.describe import check_model, parameter_names
from deeptide._optimizers.groups import OptimizerPlan, plan_optimizer
from deeptide._process import world
from deeptide._process.log import say
from deeptide.as_deepspeed import NotSupportedError
from deeptide.as_deepspeed.checkpoint.parameters import OffloadStandIn, mark_model
from deeptide.as_deepspeed.config.configuration import counted_once, read_config
from deeptide.as_deepspeed.engine import DeepSpeedEngine
from deeptide.as_deepspeed.helpers.loader import OrderedLoader
from deeptide.as_deepspeed.helpers.logging import set_log_level_from_string
from deeptide.as_deepspeed.training.engine_optimizer import EngineOptimizer
from deeptide.as_deepspeed.training.loss_scalers import EngineLossScale
from deeptide.config import without_own_frames

# The engines without an optimizer, by their model: one that trains may take their place.
_idle: weakref.WeakValueDictionary[int, DeepSpeedEngine] = weakref.WeakValueDictionary()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _C.DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes torch's default process group, also for a world of one, as DeepSpeed does."""
    if dist.is_initialized():
        return
    world.init_distributed(
        dist_backend,
        auto_mpi_discovery,
        distributed_port,
        verbose,
        timeout,
        init_method,
        dist_init_required,
        None,
        rank,
        world_size,
    )
    if not dist.is_initialized():
        backend = dist_backend or ("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class NoModelError(ConfigError, AssertionError):
    """initialize without a model, for which DeepSpeed raises AssertionError."""


def _place(model: torch.nn.Module) -> None:
    """Moves the model to this rank's GPU, where there is one: DeepSpeed's callers leave that to it."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        model.to(torch.device("cuda", torch.cuda.current_device()))


def _check_accelerate(config: _C.Config, ranks: int) -> None:
    """Warns if Accelerate counts other ranks than the job has. Errors: ConfigError if batch sizes do not fit then."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    count = getattr(state, "_shared_state", {}).get("num_processes", ranks)
    if count == ranks:
        return
    text = (
        f"Accelerate counts {count} of {ranks} ranks, so its batch sizes and loaders are for {count}: on a CPU, "
        "make it with Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true before it is imported"
    )
    try:
        config.batch_sizes(ranks)
    except ConfigError:
        raise ConfigError(text) from None
    say(text, "warning")


def _plan(model: torch.nn.Module, config: _C.Config, optimizer: Any, model_parameters: Any) -> OptimizerPlan | None:
    others = groups_of_stages(model)
    if model_parameters is not None and not isinstance(model_parameters, torch.Tensor):
        model_parameters = list(model_parameters)
        if not model_parameters and optimizer is None and not others:  # an engine for inference
            return None
    if isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer):
        model_parameters = model_parameters if callable(optimizer) else None
    return plan_optimizer(
        model, parameter_names(model), config, optimizer, model_parameters or None, extra_keys=True, others=others
    )


@without_own_frames
def initialize(
    args: object = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = _C.DEFAULT_PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: object = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Makes the engine; returns (engine, optimizer, loader, scheduler), None for what was not asked for. Collective.

    As deeptide.initialize, and as DeepSpeed's: moves the model to this rank's GPU, makes the default process group,
    translates what libraries write into configurations, and takes the place of an engine that only evaluated the model.
    """
    if mesh_param is not None:
        raise NotSupportedError("initialize(mesh_param=…): there is no sequence parallelism yet; leave it out")
    if model is None:
        raise NoModelError("deepspeed.initialize requires a model: got None, expected a torch.nn.Module")
    model = check_model(model)
    given, parsed = read_config(config if config is not None else config_params, args)
    if given.get("log_level"):
        set_log_level_from_string(given["log_level"])
    init_distributed(distributed_port=distributed_port)
    if mpu is None and not is_pipeline(model):
        parsed = counted_once(given, parsed, dist.get_world_size())
        _check_accelerate(parsed, dist.get_world_size())
    parsed = tuned(parsed, optimizer)
    optimizer_given = optimizer
    previous = _idle.pop(id(model), None)
    if previous is not None:
        previous.destroy()
    _place(model)
    with cut(model, parsed, optimizer, model_parameters) as own:
        plan = _plan(model, parsed, optimizer, own)
        if plan is None and parsed.scheduler.type:
            parsed = parsed.without_scheduler()
        engine, optimizer, loader, scheduler = make_engine(
            _kind_for(model), model, parsed, plan, lr_scheduler, training_data, collate_fn, mpu=mpu,
            make_loader=functools.partial(OrderedLoader, shuffle=not is_pipeline(model)),  # pipelines take data's order
            optimizer_kind=EngineOptimizer,
        )  # fmt: skip
    assert isinstance(engine, DeepSpeedEngine)
    engine.given_config = given
    engine.client_optimizer, engine.client_lr_scheduler = optimizer_given, lr_scheduler
    engine.training_data, engine.collate_fn, engine.mpu = training_data, collate_fn, mpu
    _dress(engine, model)
    if plan is None:
        _idle[id(model)] = engine
    return engine, engine.optimizer, loader, scheduler


def _kind_for(model: torch.nn.Module) -> type[DeepSpeedEngine]:
    if not is_pipeline(model):
        return DeepSpeedEngine
    from deeptide.as_deepspeed.pipe.engine import PipelineEngine

    return PipelineEngine


def _dress(engine: DeepSpeedEngine, model: torch.nn.Module) -> None:
    """Adds what libraries look for in fp16 and at stage 3, and an optimizer's stand-in where there is none."""
    if engine.optimizer is not None and engine.fp16_enabled():
        engine.optimizer.loss_scaler = engine.optimizer.loss_scale_config = EngineLossScale(engine)
    if engine.zero_optimization_stage() != 3:
        return
    mark_model(model, engine.world_size)
    stand_in = OffloadStandIn(model)
    if engine.optimizer is None:
        engine.optimizer = stand_in
    else:
        engine.optimizer.parameter_offload = stand_in


__all__ = ["ConfigError", "init_distributed", "initialize"]
