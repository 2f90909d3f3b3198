# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.plan: the bytes that an engine would take, before any are taken, and the settings that fit a machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch

from deeptide import _C
from deeptide._forecast.plan_mesh import Mesh, Parts, bounds_of, mesh_of, plans_of_stages
from deeptide._forecast.steps import Order, Rates, Step, StepForecast
from deeptide._model.describe import check_model, describe, parameter_names
from deeptide._optimizers.groups import OptimizerSource, ParametersSource, plan_optimizer
from deeptide.activations.choice import budget_of
from deeptide.config import ConfigSource, load_config
from deeptide.pipeline.cutting.chunks import chunks_of, starts_of

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The engine's bytes of one rank, by role and by phase. Activations and the program's own memory come on top."""

    core: _C.MemoryPlan
    activation_bytes: int | None = dataclasses.field(default=None, kw_only=True)
    """Activations of one rank at most, as "activation_checkpointing" allows them; None: nothing bounds them."""
    step: StepForecast | None = dataclasses.field(default=None, kw_only=True)
    """A step on paper, stage by stage: what it keeps, sends and takes; None: no batch was given."""

    @property
    def lines(self) -> dict[str, _C.PlanLine]:
        """{role: line}."""
        return {line.role: line for line in self.core.lines}

    @property
    def phases(self) -> dict[str, int]:
        """{phase: bytes of memory}."""
        return {phase.name: phase.memory_bytes for phase in self.core.phases}

    @property
    def peak_bytes(self) -> int:
        """Bytes of one rank's memory, in its largest phase."""
        return max(self.phases.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of a host's memory, with all its ranks and their devices."""
        off_device = sum(line.off_device_bytes for line in self.core.lines)
        return (self.peak_bytes + off_device) * self.core.ranks_per_host

    @property
    def host_file_bytes(self) -> int:
        """On the disks of a host."""
        return sum(line.file_bytes for line in self.core.lines) * self.core.ranks_per_host

    def __str__(self) -> str:
        core = self.core
        shares = ", which share one copy of the parameters" if core.shares_memory else ""
        rows = [
            f"ZeRO stage {core.stage}, {core.world_size} ranks, {core.ranks_per_host} per host{shares}",
            f"model: {core.num_parameters / 1e6:.2f} M parameters ({core.num_trained / 1e6:.2f} M trained) "
            f"in {core.num_units} units",
            "",
            f"{'per rank':<20}{'memory':>12}{'files':>12}",
        ]
        rows += [f"{line.role:<20}{_size(line.memory_bytes):>12}{_size(line.file_bytes):>12}" for line in core.lines]
        off_device = sum(line.off_device_bytes for line in core.lines)
        rows += [f"{'in the host, beside':<20}{_size(off_device):>12}"] if off_device else []
        rows += ["", f"{'in phase':<20}{'memory':>12}"]
        rows += [f"{name:<20}{_size(count):>12}" for name, count in self.phases.items()]
        rows += [
            "",
            f"{'per host':<20}{_size(self.host_bytes):>12}{_size(self.host_file_bytes):>12}",
            *self._step_lines(),
            self._on_top(),
        ]
        return "\n".join(rows)

    def _step_lines(self) -> list[str]:
        if self.step is None:
            return []
        rows = [
            "",
            f"{'a step, per rank of':<20}{'alive':>8}{'activations':>14}{'sent in host':>14}{'between':>12}  of",
        ]
        for number, stage in enumerate(self.step.stages):
            for row, sent in enumerate(stage.transfers or [None]):
                begin = f"stage {number}" if row == 0 else ""
                kept = f"{stage.live:>8}{_size(stage.activation_bytes):>14}" if row == 0 else " " * 22
                size = f"{_size(sent.within_bytes):>14}{_size(sent.between_bytes):>12}  {sent.kind}" if sent else ""
                rows.append(f"{begin:<20}{kept}{size}")
        speed = f"{self.step.seconds:.4g} s, {self.step.tokens / self.step.seconds:.0f} tokens in a second"
        return [*rows, f"forecast of a step: {speed}, bubble {100 * self.step.bubble:.1f} %", ""]

    def _on_top(self) -> str:
        if self.step is not None:
            return "What the program itself allocates, and gradients within autograd, come on top."
        bound = self.activation_bytes
        most = "" if bound is None else f", at most {_size(bound)} per rank (activation_checkpointing.memory),"
        return f"Activations{most} and what the program itself allocates come on top."


@dataclasses.dataclass(frozen=True)
class MeshPlan(MemoryPlan):
    """The plan of a mesh: `core` is that of the stage whose ranks take the most."""

    mesh: Mesh
    stages: list[MemoryPlan]  # of one rank of each
    lent: list[int]  # elements that each stage uses and another one owns
    ranks_per_host: int

    def _on_fullest_host(self, bytes_of: Callable[[MemoryPlan], int]) -> int:
        each = [bytes_of(stage) for stage in self.stages]
        hosts = self.mesh.stages_on_hosts(self.ranks_per_host)
        return max(sum(each[stage] * ranks for stage, ranks in host.items()) for host in hosts)

    @property
    def host_bytes(self) -> int:
        """Bytes of the fullest host's memory, with all its ranks and their devices."""
        return self._on_fullest_host(
            lambda stage: stage.peak_bytes + sum(line.off_device_bytes for line in stage.core.lines)
        )

    @property
    def host_file_bytes(self) -> int:
        """On the disks of the fullest host."""
        return self._on_fullest_host(lambda stage: sum(line.file_bytes for line in stage.core.lines))

    def __str__(self) -> str:
        core = self.core
        head = (
            f"ZeRO stage {core.stage}, {self.mesh.num_ranks} ranks: {self.mesh}, {self.ranks_per_host} per host",
            "",
            f"{'per rank of a':<16}{'elements':>12}" + "".join(f"{role:>18}" for role in self.lines) + f"{'peak':>12}",
        )
        rows = []
        for number, stage in enumerate(self.stages):
            name = f"stage {number}" if len(self.stages) > 1 else "tensor team"
            sizes = "".join(f"{_size(line.memory_bytes):>18}" for line in stage.lines.values())
            rows.append(f"{name:<16}{stage.core.num_parameters:>12}{sizes}{_size(stage.peak_bytes):>12}")
        rows += [
            f"stage {stage} also holds {count} elements that other stages lend it, and their gradients"
            for stage, count in enumerate(self.lent)
            if count
        ]
        rows += [
            "",
            f"{'fullest host':<20}{_size(self.host_bytes):>12}{_size(self.host_file_bytes):>12} in files",
            *self._step_lines(),
            self._on_top(),
        ]
        return "\n".join([*head, *rows])


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def _activation_bytes(config: _C.Config) -> int | None:
    return budget_of(json.loads(_C.config_section(config, "activation_checkpointing")))


def plan(
    model: torch.nn.Module,
    config: ConfigSource,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
    batch: Any = None,
    rates: Rates | None = None,
) -> MemoryPlan:
    """The memory that `initialize` with these arguments would take on each of `world_size` ranks; nothing is allocated.

    model: as for initialize; built under zero.Init it takes no memory itself. ranks_per_host: all, unless given. With
    parallel.pipeline or parallel.tensor, a MeshPlan, which has a plan for each stage. batch: one micro-batch of a rank,
    as train_batch takes it, of which shapes alone are read: the plan then has `step`: activations, transfers, and the
    time at `rates`. Errors: ConfigError, as initialize raises where it follows from model and configuration, and if the
    model's forward needs values.
    """
    config = load_config(config)
    mesh = mesh_of(config, world_size)
    on_host = ranks_per_host or world_size
    if mesh.pipeline == mesh.tensor == 1:
        description, options = _described(model, config, optimizer, model_parameters)
        made = _C.plan(description, config, options, world_size, ranks_per_host or 0)
        step = _step(model, config, mesh, on_host, [made], batch, rates)
        return MemoryPlan(made, activation_bytes=_activation_bytes(config), step=step)
    model = check_model(model)
    parts = Parts(model, config, mesh)
    stages = plans_of_stages(model, config, mesh, on_host, parts, optimizer, model_parameters)
    lent = [parts.lent_numel(stage) for stage in range(mesh.pipeline)]
    plans = [MemoryPlan(stage) for stage in stages]
    largest = max(plans, key=lambda each: each.peak_bytes)
    step = _step(model, config, mesh, on_host, stages, batch, rates)
    return MeshPlan(largest.core, mesh, plans, lent, on_host, activation_bytes=_activation_bytes(config), step=step)


def _step(
    model: torch.nn.Module,
    config: _C.Config,
    mesh: Mesh,
    on_host: int,
    stages: list[_C.MemoryPlan],
    batch: Any,
    rates: Rates | None,
) -> StepForecast | None:
    """The forecast of a step as the configuration orders it."""
    if batch is None:
        return None
    from deeptide._forecast.measure import measured

    section = json.loads(_C.config_section(config, "parallel"))
    policy = json.loads(_C.config_section(config, "activation_checkpointing"))["policy"]
    chunks = chunks_of(config)
    order = Order(section["schedule"], config.batch_sizes(mesh.data).accumulation, chunks, policy == "recompute")
    names, bounds = bounds_of(model, mesh.pipeline, chunks, starts_of(config))
    micro = measured(model, config, names, batch, mesh.tensor)
    return Step(micro, stages, mesh, on_host, bounds, order).forecast(rates or Rates())


def _described(
    model: torch.nn.Module,
    config: _C.Config,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
) -> tuple[_C.ModelDescription, _C.InitOptions]:
    """The core's description of the model and of its optimizer."""
    model = check_model(model)
    chosen = plan_optimizer(model, parameter_names(model), config, optimizer, model_parameters)
    groups = chosen.core_groups(config) if chosen is not None else []
    kind = chosen.override if chosen is not None else ""
    options = _C.InitOptions(None, groups, kind, custom=chosen.custom if chosen is not None else None)
    return describe(model), options


def _less(machine: _C.MachineLimits, activations: int) -> _C.MachineLimits:
    return _C.MachineLimits(
        max(machine.memory_bytes - activations, 0),
        f"{machine.bound} less {_size(activations)} of activations",
        machine.shared_memory_bytes,
        machine.lockable_bytes,
        machine.folders,
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """One setting and what it takes."""

    name: str
    sections: dict[str, dict[str, Any]]  # what to write into the configuration
    plan: MemoryPlan
    why_not: str  # empty: it fits

    @property
    def fits(self) -> bool:
        """Whether the engine's bytes fit the machine."""
        return not self.why_not


def choices(
    model: torch.nn.Module,
    config: ConfigSource,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    machine: _C.MachineLimits | None = None,
) -> list[Choice]:
    """Each stage and placement with its plan, from the fastest to the smallest; the first that fits is recommended.

    machine: this one, unless given. Files are considered where it, or the configuration, names folders for them. What
    the configuration allows for activations is left free.
    """
    given = load_config(config)
    machine = machine or _C.machine_limits(_C.offload_folders(given))
    if (activations := _activation_bytes(given)) is not None:
        machine = _less(machine, activations * (ranks_per_host or world_size))
    description, options = _described(model, given)
    found = _C.plan_choices(description, given, options, world_size, ranks_per_host or 0, machine)
    return [Choice(each.name, json.loads(each.sections), MemoryPlan(each.plan), each.why_not) for each in found]
