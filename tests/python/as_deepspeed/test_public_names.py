# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Every public path of DeepSpeed imports, and every public name of its classes is there or refused by that name.

surface.txt lists them: tools/deepspeed_surface.py read them from DeepSpeed's own modules.
"""

import importlib
import inspect
import pkgutil

import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface, start

from deeptide.as_deepspeed import NotSupportedError
from deeptide.as_deepspeed.names import surface

MODULES = [key for key in surface._lines() if ":" not in key and not key.endswith("/")]
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
# Attributes that programs were seen to read.
SEEN = "tput_timer client_optimizer data_parallel_group dist_backend param_names pipeline_parallelism save_fp16_model"


def test_every_public_path_imports():
    interface()
    assert len(surface.paths()) > 700
    for path in sorted(surface.paths()):
        module = importlib.import_module(path)
        assert module.__spec__ is not None, path
        if surface.is_package(path):
            assert module.__path__, path
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.runtime.there_is_none")
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.runtime.utils.there_is_none")
    assert callable(importlib.import_module("deepspeed.utils").z3_leaf_module)  # a module's name as well
    folder = importlib.import_module("deepspeed.accelerator").__path__
    found = {each.name for each in pkgutil.iter_modules(folder)}
    assert {"cpu_accelerator", "cuda_accelerator"} <= found


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_is_there_or_refused_by_its_name(name):
    interface()
    module = importlib.import_module(name)
    for member in surface.members(name):
        value = getattr(module, member)
        if isinstance(value, type) and type(value).__name__ == "_RefusedType":
            with pytest.raises(NotSupportedError, match=rf"\.{member} is not supported by Deeptide: ."):
                value()


def test_every_function_takes_the_parameters_that_deepspeeds_takes():
    interface()
    checked = 0
    for key in (key for key in surface._lines() if key.endswith("()")):
        module, name = key[:-2].split(":")
        function = getattr(importlib.import_module(module), name, None)
        if function is None or type(function).__name__ == "_RefusedType":
            continue
        mine = inspect.signature(function).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in mine):
            assert set(surface.members(key)) <= {each.name for each in mine}, key
            checked += 1
    assert checked > 100


def refused(thing, key):
    """The names of a list that a thing does not have; each names itself when it is read."""
    missing = set()
    for name in surface.members(key):
        try:
            getattr(thing, name)
        except (AttributeError, NotSupportedError) as error:
            assert name in str(error) and not hasattr(thing, name), (key, name, error)
            missing.add(name)
    return missing


def check_classes():
    deepspeed, engine, optimizer, _ = start(2)
    topology = importlib.import_module("deepspeed.runtime.pipe.topology")
    timer = importlib.import_module("deepspeed.utils.timer")
    cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    zero = "deepspeed.runtime.zero"
    grid = topology.PipelineParallelGrid(topology.PipeDataParallelTopology(1, 1))
    layer = deepspeed.pipe.LayerSpec(torch.nn.Linear, 2, 2)
    missing = refused(engine, ENGINE)
    assert len(missing) < 50 and not missing & set(SEEN.split()), missing
    for thing, key, most in (
        (optimizer, f"{zero}.stage3:DeepSpeedZeroOptimizer_Stage3", 160),
        (optimizer, f"{zero}.stage_1_and_2:DeepSpeedZeroOptimizer", 170),
        (cpu, "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", 4),
        (deepspeed.get_accelerator(), "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator", 4),
        (deepspeed.DeepSpeedConfig({"train_batch_size": 1}), "deepspeed.runtime.config:DeepSpeedConfig", 20),
        (deepspeed.zero.Init(), f"{zero}.partition_parameters:Init", 43),
        (deepspeed.zero.GatheredParameters([]), f"{zero}.partition_parameters:GatheredParameters", 4),
        (topology.PipeDataParallelTopology(1, 1), "deepspeed.runtime.pipe.topology:ProcessTopology", 0),
        (grid, "deepspeed.runtime.pipe.topology:PipelineParallelGrid", 2),
        (layer, "deepspeed.runtime.pipe.module:LayerSpec", 1),
        (timer.ThroughputTimer(), "deepspeed.utils.timer:ThroughputTimer", 4),
        (timer.SynchronizedWallClockTimer(), "deepspeed.utils.timer:SynchronizedWallClockTimer", 8),
    ):
        assert len(refused(thing, key)) <= most, (key, refused(thing, key))
    pipe = deepspeed.pipe.PipelineModule([layer], num_stages=1, loss_fn=torch.nn.MSELoss())
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    stages = deepspeed.initialize(model=pipe, config=config)[0]
    assert len(refused(pipe, "deepspeed.runtime.pipe.module:PipelineModule")) < 30
    assert len(refused(stages, "deepspeed.runtime.pipe.engine:PipelineEngine")) < 90
    assert stages.pipeline_parallelism and not engine.pipeline_parallelism

    engine.tput_timer.update_epoch_count()
    for _ in range(4):
        engine.backward(engine(*__import__("models").batches(1, 2)[0]))
        engine.step()
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.avg_samples_per_sec() > 0
    assert engine.tput_timer.epoch_count == 1
    assert optimizer.optimizer is optimizer and optimizer.get_lr() == engine.get_lr()[0]
    assert optimizer.clip_grad == engine.gradient_clipping() and optimizer.partition_count == 1
    weight = engine.module.norm.weight
    assert torch.equal(optimizer.get_full_hp_param(weight), weight) and weight in engine.param_names
    with pytest.raises(NotSupportedError, match=r"DeepSpeedZeroOptimizer\.bit16_groups_flat is not supported"):
        optimizer.bit16_groups_flat  # noqa: B018
    with pytest.raises(NotSupportedError, match=r"DeepSpeedEngine\.allreduce_gradients is not supported.*engine\.step"):
        engine.allreduce_gradients()
    with pytest.raises(AttributeError, match="has an attribute 'there_is_none'"):
        engine.there_is_none  # noqa: B018


def test_every_public_attribute_is_there_or_refused_by_its_name():
    run_processes(1, check_classes)
