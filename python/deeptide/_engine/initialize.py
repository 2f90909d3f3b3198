# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.initialize: a model and a configuration become an engine."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.data

from deeptide import _C
from deeptide._C import CommError, Config, ConfigError, World
from deeptide._engine import less_work
from deeptide._model import compiled, tensor_methods
from deeptide._model.buffers import looks_at
from deeptide._model.describe import check_model, describe, device_of, parameter_names
from deeptide._optimizers.groups import OptimizerPlan, OptimizerSource, ParametersSource, plan_optimizer
from deeptide._process.world import abort_groups, find_world
from deeptide.config import ConfigSource, load_config, without_own_frames
from deeptide.data import DataLoader
from deeptide.engine import Engine
from deeptide.optimizer import DeeptideOptimizer
from deeptide.schedule import resolve_schedule

if TYPE_CHECKING:
    from deeptide._tuning.lr_range import RangeTest
    from deeptide._tuning.run import TuningRun
    from deeptide.activations.policy import Activations
    from deeptide.efficiency.loader import CurriculumLoader
    from deeptide.tensor.team import Team

range_test: RangeTest | None = None  # the test that the next engine takes, under `deeptide lr-range`
tuning_run: TuningRun | None = None  # what the next engine with an optimizer is for, under `deeptide tune`


def _loader(
    training_data: torch.utils.data.Dataset[Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Config,
    world: World,
    make: Callable[..., DataLoader],
) -> DataLoader | CurriculumLoader | None:
    if training_data is None:
        if collate_fn is not None:
            raise ConfigError("collate_fn was given without training_data and would have no effect")
        return None
    if json.loads(_C.config_section(config, "data_efficiency.data_sampling.curriculum_learning"))["enabled"]:
        from deeptide.efficiency.loader import CurriculumLoader

        return CurriculumLoader(training_data, config, config.batch_sizes(world.size), collate_fn, world)
    return make(
        training_data,
        batch_size=config.batch_sizes(world.size).micro,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        seed=config.runtime.seed,
        world=world,
    )


def _stages(config: Config, model: torch.nn.Module) -> int:
    """The stages of the model's pipeline; 1 where it is none. Errors: ConfigError if the configuration differs."""
    if not is_pipeline(model) and json.loads(_C.config_section(config, "parallel"))["pipeline"]["stages"] is None:
        return 1  # without a look at the package of pipelines
    from deeptide.pipeline.engine import check_mesh

    return check_mesh(config, model)


def _data_world(world: World, stages: int, tensor: int) -> World:
    """The ranks that train on different batches, as a loader counts them."""
    if stages == tensor == 1:
        return world
    size = world.size // stages // tensor
    return _C.make_world(world.store, world.rank // tensor % size, size)


def _asks_for_teams(config: Config) -> bool:
    """Whether the configuration lets ranks share layers."""
    theirs = json.loads(_C.config_section(config, "tensor_parallel"))
    ours = json.loads(_C.config_section(config, "parallel"))["tensor"]
    return bool(max(ours, theirs["autotp_size"], theirs["tensor_parallel"]["tp_size"]) > 1)


def _mpu_of(model: torch.nn.Module, world: World) -> object:
    """That of a PipelineModule whose topology has ranks that share layers; else None."""
    kind = getattr(sys.modules.get("deeptide.pipeline.module"), "PipelineModule", ())  # another thread may import it
    if not isinstance(model, kind) or not model.shares_layers():
        return None
    from deeptide.tensor.mpu import OfTopology

    return OfTopology(model.topology(), world.rank)


def _tensor_team(config: Config, model: torch.nn.Module, world: World, stages: int, mpu: object) -> Team | None:
    """The ranks that share layers with this one, which are cut now; None where there is no such axis."""
    data = json.loads(_C.config_section(config, "parallel"))["data"]
    mpu = _mpu_of(model, world) if mpu is None else mpu
    if not _asks_for_teams(config) and data is None and mpu is None and "deeptide.tensor" not in sys.modules:
        return None  # without a look at the package of tensor parallelism
    from deeptide.tensor.axis import prepare

    return prepare(config, model, world, stages, mpu)


def _options_of(model: torch.nn.Module, team: Team | None) -> dict[str, Any]:
    if team is None:
        return {}
    from deeptide.tensor.axis import options_of

    return options_of(model, team)


def _cuts_of(model: torch.nn.Module, team: Team) -> dict[str, Callable[[Any], Any]]:
    from deeptide.tensor.axis import cuts_of

    return cuts_of(model, team)


def is_pipeline(model: torch.nn.Module) -> bool:
    """Whether it is a PipelineModule, or was cut into stages."""
    if "_deeptide_cut" in model.__dict__:
        return True
    if not hasattr(model, "num_stages"):
        return False
    from deeptide.pipeline.module import PipelineModule

    return isinstance(model, PipelineModule)


def groups_of_stages(model: torch.nn.Module) -> Container[int]:
    """Indices of optimizer groups that any stage of a model's pipeline may train; none without stages.

    Each stage keeps them, also without a parameter.
    """
    if not is_pipeline(model):
        return ()
    from deeptide.pipeline.cutting.cut import groups_of

    return groups_of(model)


def cut(
    model: torch.nn.Module,
    config: Config,
    optimizer: Any,
    parameters: ParametersSource | None,
    world: World | None = None,
) -> contextlib.AbstractContextManager[ParametersSource | None]:
    """Around the making of an engine: cuts a plain model into stages where "parallel" asks for some.

    Where ranks of a stage share layers, those are cut at the same time, while the model is whole. Gives
    `model_parameters` without those of other stages. An error inside leaves model and optimizer as they were, but for
    layers that were cut among ranks.
    """
    stages = json.loads(_C.config_section(config, "parallel"))["pipeline"]["stages"]
    if (stages or 1) == 1 or ("_deeptide_cut" not in model.__dict__ and is_pipeline(model)):
        return contextlib.nullcontext(parameters)
    from deeptide.pipeline.cutting.chunks import chunks_of
    from deeptide.pipeline.cutting.cut import cut_by_blocks

    share = None
    if _asks_for_teams(config):
        from deeptide.tensor.axis import share_layers

        share = functools.partial(share_layers, config, model, world, stages)
    return cut_by_blocks(model, config, stages, optimizer, parameters, world, share, chunks_of(config))


def tuned(config: Config, optimizer: Any) -> Config:
    """The configuration of this run, where `deeptide tune` runs the script and this engine trains."""
    if tuning_run is None or (optimizer is None and config.optimizer.defaults.optimizer is None):
        return config
    return tuning_run.configure(config)


def section_with_policy(config: Config) -> dict[str, Any] | None:
    """The section "activation_checkpointing" where it says what is recomputed; None where it does not."""
    section: dict[str, Any] = json.loads(_C.config_section(config, "activation_checkpointing"))
    return None if section["policy"] == "none" and section["memory"] is None else section


def _policy_for_activations(config: Config, model: torch.nn.Module) -> Activations | None:
    """The policy that "activation_checkpointing" asks for; None: none. Errors: ConfigError; nothing was changed."""
    section = section_with_policy(config)
    if section is None:
        return None  # without a look at the package
    from deeptide.activations.policy import Activations

    return Activations(section, model)


def _kind_for(model: torch.nn.Module) -> type[Engine]:
    if not is_pipeline(model):
        return Engine
    from deeptide.pipeline.engine import PipelineEngine

    return PipelineEngine


@without_own_frames
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
    mpu: an object as Megatron's, of a model whose own layers its groups share. mesh_param: an error.
    world: a deeptide.World; else torch.distributed's, else the launcher's, else a world of one.
    The engine works where the model is: move it before. Errors: ConfigError (a ValueError); nothing is changed then.
    """
    model = check_model(model)
    if mesh_param is not None:
        raise ConfigError("mesh_param is not supported yet; give the axes as parallel.tensor and parallel.pipeline")
    config = tuned(load_config(config, args, config_params), optimizer)
    with cut(model, config, optimizer, model_parameters, world) as own:
        plan = plan_optimizer(model, parameter_names(model), config, optimizer, own, others=groups_of_stages(model))
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
            mpu,
        )


def _groups_of(plan: OptimizerPlan | None, model: torch.nn.Module, config: Config) -> tuple[list[Any], str | None]:
    """(the core's groups of parameters, the optimizer that takes the configuration's place)."""
    if plan is None:
        return [], ""
    plan.note_left_out(model)
    return plan.core_groups(config), plan.override


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
    mpu: object = None,
    make_loader: Callable[..., DataLoader] = DataLoader,
    optimizer_kind: type[DeeptideOptimizer] = DeeptideOptimizer,
) -> tuple[Engine, DeeptideOptimizer | None, DataLoader | CurriculumLoader | None, Any]:
    """`initialize` of another class of engine, for other interfaces. `plan`: is optimized."""
    if lr_scheduler is not None and config.scheduler.type:
        config = config.without_scheduler()
    timeout_s = config.runtime.comm_timeout_s
    world, process_groups = find_world(world, device_of(model), dist_init_required, distributed_port, timeout_s)
    stages = _stages(config, model)
    activations = _policy_for_activations(config, model)
    team = _tensor_team(config, model, world, stages, mpu)
    if tuning_run is not None and plan is not None:
        kind = tuning_run.begin(kind, model, config, plan, world, stages * (team.size if team else 1))
    ranks = _data_world(world, stages, team.size if team else 1)
    loader = _loader(training_data, collate_fn, config, ranks, make_loader)
    groups, optimizer_type = _groups_of(plan, model, config)
    core = None
    try:
        custom = plan.custom if plan is not None else None
        if team is not None and custom is not None:
            custom.cuts = _cuts_of(model, team)
        options = _C.InitOptions(
            world, groups, optimizer_type, *looks_at(model), custom, stages, **_options_of(model, team)
        )
        core = _C.Engine(describe(model), config, options)
        if any(map(_C.has_deferred_key, model.parameters())):
            tensor_methods.install()
            compiled.install()
        if range_test is not None:
            kind = range_test.engine_kind(kind)
        ours = optimizer_kind(plan, core) if plan is not None else None
        scheduler = resolve_schedule(lr_scheduler, ours, config)
        engine = kind(core, model, config, ours, scheduler, loader, process_groups)
        if activations is not None:
            activations.begin(engine)
            engine._activations = activations
        less_work.begin(engine)
        return engine, ours, loader, scheduler
    except BaseException as error:
        # Now and not when the traceback goes: the caller may catch this and use his model.
        if isinstance(error, CommError):
            abort_groups(process_groups)
        if core is not None:
            core.close()
        for group in process_groups:
            dist.destroy_process_group(group)
        raise
