# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a run of `deeptide tune`: a survey of the script's model, some steps to be timed, or the training itself.

The first engine of the script that has an optimizer takes the run's configuration; rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError, World
from deeptide._engine import initialize as _initialize
from deeptide._forecast.plan import MemoryPlan
from deeptide._model.describe import describe, device_of
from deeptide._model.recomputation import recomputes, set_recomputation
from deeptide._optimizers.groups import OptimizerPlan
from deeptide._tuning.run_script import run_script
from deeptide.engine import Engine

_MOST_BYTES = 2**62  # the search compares with the machine, which the survey's own ranks are part of


class TuningRun:
    """The purpose of the script's first engine. `wanted`: the words of `deeptide._tuning.command`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted
        self.finished = False

    def configure(self, config: Config) -> Config:
        """The configuration of this run. Before the model is cut, as the run's mesh may ask."""
        return config if self.wanted["mode"] == "survey" else config.merged(json.dumps(self.wanted["patch"]))

    def begin(
        self,
        kind: type[Engine],
        model: torch.nn.Module,
        config: Config,
        plan: OptimizerPlan,
        world: World,
        shared: int,
    ) -> type[Engine]:
        """The engine's class; a survey ends the script here. `shared`: ranks that have one replica together."""
        _initialize.tuning_run = None
        if self.wanted["mode"] == "survey":
            self.end(world, _survey(model, config, plan, world, shared))
        if "recomputes" in self.wanted:
            set_recomputation(model, self.wanted["recomputes"])
        if self.wanted["mode"] == "train":
            self.finished = True
            return kind
        clock = _StepClock(self, world, config, device_of(model), shared)
        return type(kind.__name__, (_Timed, kind), {"_step_clock": clock})

    def end(self, world: World, result: dict[str, Any]) -> NoReturn:
        """Writes the result on rank 0, and ends the script on all ranks. Collective."""
        self.finished = True
        world.store.set(f"tune/ended/{world.rank}", "")
        if world.rank == 0:
            world.store.wait([f"tune/ended/{rank}" for rank in range(world.size)])  # which it may hold
            Path(self.wanted["result"]).write_text(json.dumps(result))
        raise SystemExit(0)


def _survey(model: torch.nn.Module, config: Config, plan: OptimizerPlan, world: World, shared: int) -> dict[str, Any]:
    """The configuration, the batch and what each setting would take. Nothing is allocated."""
    if json.loads(_C.config_section(config, "elasticity"))["enabled"]:
        raise ConfigError('deeptide tune: "elasticity" decides the batch sizes; take that section out')
    ranks_per_host, num_batches = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), world.size // shared
    options = _C.InitOptions(None, plan.core_groups(config), plan.override, custom=plan.custom)
    described = describe(model)
    machine = _C.MachineLimits(_MOST_BYTES, "nothing", folders=_C.machine_limits(_C.offload_folders(config)).folders)
    on_host = max(ranks_per_host // shared, 1)
    found = _C.plan_choices(described, config, options, num_batches, on_host, machine)
    own = _C.plan(described, config, options, num_batches, on_host)
    batch = config.batch_sizes(num_batches)
    given = json.loads(config.merged("{}").text)
    mappings = given.get("autotuning", {}).get("arg_mappings", {})
    return {
        "config": given,
        "origin": config.origin,
        "autotuning": json.loads(_C.config_section(config, "autotuning")) | {"arg_mappings": mappings},
        "world": world.size,
        "shared": shared,
        "ranks_per_host": ranks_per_host,
        "device": device_of(model).type,
        "device_bytes": _device_bytes(device_of(model)),
        "batch": [batch.train, batch.micro, batch.accumulation],
        "parameters": own.num_parameters,
        "recomputes": None if _initialize.section_with_policy(config) else recomputes(model),
        "stage": config.zero.stage,
        "bytes": _bytes(own),
        "meshes": _meshes(model, world) if shared == 1 else [],
        "choices": [
            {
                "name": each.name,
                "sections": json.loads(each.sections),
                "bytes": _bytes(each.plan),
                "why_not": each.why_not,
            }
            for each in found
        ],
    }


def _meshes(model: torch.nn.Module, world: World) -> list[dict[str, Any]]:
    """The meshes that this many ranks can form beside the data axis alone, and what the model has against them."""
    found: list[dict[str, Any]] = []
    for size in (size for size in range(2, world.size + 1) if world.size % size == 0):
        found += [{"axis": "pipeline", "size": size, "why_not": _why_no_pipeline(model, size)}]
        found += [{"axis": "tensor", "size": size, "why_not": ""}]
    return found


def _why_no_pipeline(model: torch.nn.Module, stages: int) -> str:
    from deeptide.pipeline.cutting.blocks import find_blocks

    if _initialize.is_pipeline(model):
        return "the program cuts its PipelineModule itself"
    try:
        find_blocks(model, stages)
    except ConfigError as error:
        return str(error)
    return ""


def _bytes(core: _C.MemoryPlan) -> dict[str, int]:
    plan = MemoryPlan(core)
    return {"rank": plan.peak_bytes, "host": plan.host_bytes, "files": plan.host_file_bytes}


def _device_bytes(device: torch.device) -> int:
    """The memory of the accelerator; 0: the processor's."""
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).mem_get_info(device)[1])


class _StepClock:
    """Times the measured steps, and counts samples and memory on the way."""

    def __init__(self, run: TuningRun, world: World, config: Config, device: torch.device, shared: int) -> None:
        self._run, self._world, self._device = run, world, device
        self._num_batches = world.size // shared
        self._batch = config.batch_sizes(self._num_batches)
        self.uses_train_batch = False
        self._ends: list[float] = []
        self._samples = 0  # of this step, as forward sees them
        self._counted: list[int] = []
        self._resident_before = _resident_bytes()

    def see_batch(self, values: list[Any]) -> None:
        """Counts the rows of the first tensor that a micro-batch holds."""
        first = next((value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0), None)
        self._samples += 0 if first is None else first.shape[0]

    def end_step(self) -> None:
        """Ends the script after the last measured step. Collective."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._ends.append(time.perf_counter())
        self._counted.append(self._samples)
        self._samples = 0
        if len(self._ends) >= self._run.wanted["last_step"] + 1:
            self._run.end(self._world, self.result())

    def result(self) -> dict[str, Any]:
        """This rank's figures: ranks step together."""
        first = self._run.wanted["first_step"]
        times = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)][first - 1 :]
        counted = self._counted[-1]
        expected = self._batch.micro * self._batch.accumulation
        samples = (counted or expected) * self._num_batches
        seconds = statistics.median(times)
        return {
            "step_s": seconds,
            "samples_per_s": samples / seconds,
            "samples": samples,
            "follows": counted in (0, expected),
            "train_batch": self.uses_train_batch,
            "grown_bytes": max(_resident_bytes() - self._resident_before, 0),
            "device_bytes": _device_peak(self._device),
        }


def _resident_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).max_memory_allocated(device))


class _Timed(Engine):
    """An engine whose class holds the clock of a short run."""

    _step_clock: _StepClock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self._step_clock.see_batch([*args, *kwargs.values()])
        return super().forward(*args, **kwargs)

    def train_batch(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._step_clock.uses_train_batch = True
        return super().train_batch(*args, **kwargs)

    def _step(self, take: Any, lr_kwargs: dict[str, Any] | None) -> Any:
        at_boundary = self.is_gradient_accumulation_boundary()
        outcome = super()._step(take, lr_kwargs)
        if at_boundary:
            self._step_clock.end_step()
        return outcome


def main() -> None:
    """Runs the script; the words of the command line are those of `deeptide._tuning.command`."""
    wanted = json.loads(sys.argv[1])
    run = TuningRun(wanted)
    _initialize.tuning_run = run
    run_script(sys.argv[2], sys.argv[3:], wanted["as_module"])
    if run.finished:
        return
    steps = wanted.get("last_step", 0) + 1
    raise ConfigError(
        f"deeptide tune: the script ended before step {steps} of an engine with an optimizer; let it train longer, or "
        'lower "end_profile_step" in "autotuning"'
    )


if __name__ == "__main__":
    main()
