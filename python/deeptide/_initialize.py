# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.initialize: a model and a configuration become an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.data

from deeptide import _C, _compiled, _tensor_methods
from deeptide._C import CommError, Config, ConfigError, World
from deeptide._groups import OptimizerPlan, OptimizerSource, ParametersSource, plan_optimizer
from deeptide._model import check_model, describe, describer, device_of, parameter_names
from deeptide._world import abort_groups, find_world
from deeptide.config import ConfigSource, load_config
from deeptide.data import DataLoader
from deeptide.engine import Engine
from deeptide.optimizer import DeeptideOptimizer
from deeptide.schedule import resolve_schedule

if TYPE_CHECKING:
    from deeptide._lr_range import RangeTest
    from deeptide._tune_run import TuningRun
    from deeptide.efficiency.loader import CurriculumLoader

range_test: RangeTest | None = None  # the test that the next engine takes, under `deeptide lr-range`
tuning_run: TuningRun | None = None  # what the next engine with an optimizer is for, under `deeptide tune`


def _loader(
    training_data: torch.utils.data.Dataset[Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Config,
    world: World,
) -> DataLoader | CurriculumLoader | None:
    if training_data is None:
        if collate_fn is not None:
            raise ConfigError("collate_fn was given without training_data and would have no effect")
        return None
    if json.loads(_C.config_section(config, "data_efficiency.data_sampling.curriculum_learning"))["enabled"]:
        from deeptide.efficiency.loader import CurriculumLoader

        return CurriculumLoader(training_data, config, config.batch_sizes(world.size), collate_fn, world)
    return DataLoader(
        training_data,
        batch_size=config.batch_sizes(world.size).micro,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        seed=config.runtime.seed,
        world=world,
    )


def _stages(config: Config, model: torch.nn.Module) -> int:
    """The stages of the model's pipeline; 1 where it is none. Errors: ConfigError if the configuration differs."""
    if not hasattr(model, "num_stages") and json.loads(_C.config_section(config, "parallel"))["pipeline"] is None:
        return 1  # without a look at the package of pipelines
    from deeptide.pipeline.engine import check_mesh

    return check_mesh(config, model)


def _data_world(world: World, stages: int) -> World:
    """The ranks that train on different batches, as a loader counts them."""
    if stages == 1:
        return world
    size = world.size // stages
    return _C.make_world(world.store, world.rank % size, size)


def _kind_for(model: torch.nn.Module) -> type[Engine]:
    if not hasattr(model, "num_stages"):
        return Engine
    from deeptide.pipeline.engine import PipelineEngine
    from deeptide.pipeline.module import PipelineModule

    return PipelineEngine if isinstance(model, PipelineModule) else Engine


def initialize(
    args: object = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = _C.DEFAULT_PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: object = None,
    config_params: ConfigSource | None = None,
    world: World | None = None,
) -> tuple[Engine, DeeptideOptimizer | None, DataLoader | CurriculumLoader | None, Any]:
    """Makes the engine; returns (engine, optimizer, loader, scheduler), None for what was not asked for. Collective.

    config: a path, a dict, a base64 string or a Config; else args.deepspeed_config names the file.
    optimizer: any torch.optim.Optimizer, or a function of parameters that makes one; else the configuration's. What is
    not one of ours steps itself: at stages above 0 it must step each element by itself.
    model_parameters: parameters or param groups; else all that require a gradient.
    training_data: a dataset; each rank gets its part. lr_scheduler: an instance or a function of the optimizer.
    world: a deeptide.World; else torch.distributed's, else the launcher's, else a world of one.
    The engine works where the model is: move it before. Errors: ConfigError (a ValueError); nothing is changed then.
    """
    model = check_model(model)
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(f"{name} is not supported yet (tensor parallelism); omit it")
    config = load_config(config, args, config_params)
    plan = plan_optimizer(model, parameter_names(model), config, optimizer, model_parameters)
    return make_engine(
        _kind_for(model),
        model,
        config,
        plan,
        lr_scheduler,
        training_data,
        collate_fn,
        world,
        dist_init_required,
        distributed_port,
    )


def make_engine(
    kind: type[Engine],
    model: torch.nn.Module,
    config: Config,
    plan: OptimizerPlan | None,
    lr_scheduler: Any = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    world: World | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int = _C.DEFAULT_PORT,
) -> tuple[Engine, DeeptideOptimizer | None, DataLoader | CurriculumLoader | None, Any]:
    """`initialize` with another class of engine, for interfaces under other names; `plan`: what is optimized."""
    if lr_scheduler is not None and config.scheduler.type:
        config = config.without_scheduler()
    timeout_s = config.runtime.comm_timeout_s
    world, process_groups = find_world(world, device_of(model), dist_init_required, distributed_port, timeout_s)
    stages = _stages(config, model)
    if tuning_run is not None and plan is not None:
        kind, config = tuning_run.begin(kind, model, config, plan, world)
    loader = _loader(training_data, collate_fn, config, _data_world(world, stages))
    if plan is not None:
        placed = {id(p) for group in plan.param_groups for p in group["params"]}
        plan.left_out = [p for p in model.parameters() if p.requires_grad and id(p) not in placed]
    groups = plan.core_groups(config) if plan is not None else []
    optimizer_type = plan.override if plan is not None else ""
    core = None
    try:
        custom = plan.custom if plan is not None else None
        options = _C.InitOptions(world, groups, optimizer_type, describer(model), custom, stages)
        core = _C.Engine(describe(model), config, options)
        if any(map(_C.has_deferred_key, model.parameters())):
            _tensor_methods.install()
            _compiled.install()
        if range_test is not None:
            kind = range_test.engine_kind(kind)
        ours = DeeptideOptimizer(plan, core) if plan is not None else None
        scheduler = resolve_schedule(lr_scheduler, ours, config)
        return kind(core, model, config, ours, scheduler, loader, process_groups), ours, loader, scheduler
    except BaseException as error:
        # Now and not when the traceback goes: the caller may catch this and use his model.
        if isinstance(error, CommError):
            abort_groups(process_groups)
        if core is not None:
            core.close()
        for group in process_groups:
            dist.destroy_process_group(group)
        raise
