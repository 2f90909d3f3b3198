# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.plan: the bytes that an engine would take, before any are taken, and the settings that fit a machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from typing import Any

import torch

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._groups import OptimizerSource, ParametersSource, plan_optimizer
from deeptide._model import check_model, describe, parameter_names
from deeptide.config import ConfigSource, load_config

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one host has left. Units: bytes."""

    memory: int
    why: str  # what bounds the memory
    disk: int | None = None  # of the fullest folder of nvme_path; None: no folder is known
    folders: tuple[str, ...] = ()

    @classmethod
    def here(cls, folders: tuple[str, ...] = ()) -> Machine:
        """This one: the kernel's estimate, or what a control group leaves, whichever is less."""
        with open("/proc/meminfo", encoding="ascii") as lines:
            numbers = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
        memory, why = numbers["MemAvailable"], "available memory"
        limit = _C.tightest_memory_limit()
        if limit is not None and limit[1] < memory:
            memory, why = limit[1], f"the limit of {limit[0]}"
        return cls(memory, why, min((_free(folder) for folder in folders), default=None), folders)


def _free(folder: str) -> int:
    """Bytes free where the folder is, or will be made."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The engine's bytes of one rank, by role and by phase. Activations and the program's own memory come on top."""

    core: _C.MemoryPlan

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
        """Of one rank's memory, in its largest phase."""
        return max(self.phases.values())

    @property
    def host_bytes(self) -> int:
        """Of the memory of a host, with all its ranks."""
        return self.peak_bytes * self.core.ranks_per_host

    @property
    def host_file_bytes(self) -> int:
        """On the disks of a host."""
        return sum(line.file_bytes for line in self.core.lines) * self.core.ranks_per_host

    def fits(self, machine: Machine) -> bool:
        """Whether the engine's bytes fit the machine."""
        disk = machine.disk if machine.disk is not None else 0
        return self.host_bytes <= machine.memory and self.host_file_bytes <= disk

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
        rows += ["", f"{'in phase':<20}{'memory':>12}"]
        rows += [f"{name:<20}{_size(count):>12}" for name, count in self.phases.items()]
        rows += [
            "",
            f"{'per host':<20}{_size(self.host_bytes):>12}{_size(self.host_file_bytes):>12}",
            "Activations and what the program itself allocates come on top.",
        ]
        return "\n".join(rows)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def plan(
    model: torch.nn.Module,
    config: ConfigSource,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
) -> MemoryPlan:
    """What `initialize` with these arguments would take on each of `world_size` ranks; nothing is allocated.

    model: as for initialize; built under zero.Init it takes no memory itself. ranks_per_host: all, unless given.
    Errors: ConfigError, as initialize raises where it follows from model and configuration.
    """
    model = check_model(model)
    config = load_config(config)
    chosen = plan_optimizer(model, parameter_names(model), config, optimizer, model_parameters)
    groups = chosen.core_groups(config) if chosen is not None else []
    kind = chosen.override if chosen is not None else ""
    options = _C.InitOptions(None, groups, kind, None, chosen.custom if chosen is not None else None)
    return MemoryPlan(_C.plan(describe(model), config, options, world_size, ranks_per_host or 0))


def _settings(folders: tuple[str, ...]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """From the fastest to the smallest: what each is called, and its part of each section of the configuration."""
    files = {"device": "nvme", "nvme_path": list(folders)}
    none = {"offload_optimizer": None, "offload_param": None}

    def setting(stage: int, gradients: bool = False, **offload: Any) -> dict[str, dict[str, Any]]:
        placement = {"gradients": {"nvme": "rest"}, "nvme_path": list(folders)} if gradients else None
        return {"zero_optimization": {"stage": stage, **none, **offload}, "deeptide": {"placement": placement}}

    found = [(f"stage {s}", setting(s)) for s in range(4)]
    if folders:
        states = [(f"stage {s}, optimizer states in files", setting(s, offload_optimizer=files)) for s in (1, 2, 3)]
        both: dict[str, Any] = {"offload_optimizer": files, "offload_param": files}
        found += [
            *states,
            ("stage 3, optimizer states and parameters in files", setting(3, **both)),
            ("stage 3, all of them and gradients in files", setting(3, gradients=True, **both)),
        ]
    return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """One setting and what it takes."""

    name: str
    sections: dict[str, dict[str, Any]]  # what to write into the configuration
    plan: MemoryPlan
    fits: bool


def _given(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without what the setting takes out of a configuration."""
    given = {name: {k: v for k, v in section.items() if v is not None} for name, section in sections.items()}
    return {name: section for name, section in given.items() if section}


def choices(
    model: torch.nn.Module,
    config: ConfigSource,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    machine: Machine | None = None,
) -> list[Choice]:
    """Each stage and placement with its plan, from the fastest to the smallest; the first that fits is recommended.

    Files are considered where the configuration names an nvme_path or `machine` folders.
    """
    given = load_config(config)
    folders = machine.folders if machine is not None else tuple(_C.offload_folders(given))
    machine = machine or Machine.here(folders)
    found = []
    for name, setting in _settings(folders):
        try:
            changed = _C.config_with(given, json.dumps(setting))
            taken = plan(model, changed, world_size, ranks_per_host)
        except ConfigError:
            continue  # this optimizer or option does not go with it
        found.append(Choice(name, _given(setting), taken, taken.fits(machine)))
    return found
