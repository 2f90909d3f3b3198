# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells what an engine would take of memory and disk, and which stage and placement fit this machine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deeptide import _C, zero
from deeptide._C import ConfigError
from deeptide._plan import Choice, MemoryPlan, MeshPlan, choices, plan
from deeptide.config import load_config

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_GIB = 2**30


def _parameters(*sizes: tuple[int, ...]) -> nn.ParameterList:
    """Without values: drawing them would take as long as for a real model."""
    return nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)


class _Block(nn.Module):
    """The parameters of a GPT's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = _parameters((width,), (width,), (width,), (width,))
        self.attention = _parameters((3 * width, width), (3 * width,), (width, width), (width,))
        self.network = _parameters((4 * width, width), (4 * width,), (width, 4 * width), (width,))


class _Transformer(nn.Module):
    """The parameters of a GPT with a tied head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = _parameters((vocabulary, width))
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = _parameters((width,), (width,))


def _width_for(parameters: int, layers: int, vocabulary: int) -> int:
    """The width, a multiple of 64, whose transformer is nearest to so many parameters."""

    def count(width: int) -> int:
        return vocabulary * width + layers * (12 * width + 13) * width + 2 * width

    width = 64
    while count(width + 64) <= parameters:
        width += 64
    return min((width, width + 64), key=lambda each: abs(count(each) - parameters))


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)([KMBT]?)", text.upper())
    try:
        return round(float(match[1]) * _UNITS[match[2]]) if match else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number such as 350M or 7B") from None


def _function_at(place: str) -> Callable[[], nn.Module]:
    """The function that "folder/script.py:name" names."""
    path, colon, name = place.rpartition(":")
    if not colon or not os.path.isfile(path):
        raise ConfigError(f"--model-file: got {place!r}, expected FILE.py:FUNCTION, with a file that exists")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("planned_model", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--model-file: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planned_model"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--model-file: {path} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _build(options: argparse.Namespace) -> nn.Module:
    with zero.Init():
        if options.model_file:
            model: Any = _function_at(options.model_file)()
            if not isinstance(model, nn.Module):
                raise ConfigError(f"--model-file: the function returned {type(model).__name__}, expected an nn.Module")
            return model
        width = options.hidden or _width_for(options.params, options.layers, options.vocab)
        print(f"a transformer of {options.layers} layers, width {width}, vocabulary {options.vocab}, tied head")
        return _Transformer(options.layers, width, options.vocab)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deeptide plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="the ds_config.json")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-file", metavar="FILE.py:FUNCTION", help="a function that returns the model")
    model.add_argument("--params", type=_count, metavar="N", help="a transformer of about so many: 350M, 7B")
    parser.add_argument("--layers", type=int, metavar="N", help="its layers (with --params)")
    parser.add_argument("--hidden", type=int, metavar="N", help="its width; without it, --params decides")
    parser.add_argument("--vocab", type=int, default=50304, metavar="N", help="its vocabulary (50304)")
    parser.add_argument("--num_ranks", type=int, default=1, metavar="N", help="ranks of the job (1)")
    parser.add_argument("--ranks_per_host", type=int, metavar="N", help="of these, on each host (all)")
    parser.add_argument("--nvme_path", action="append", metavar="FOLDER", help="a folder that may hold files")
    parser.add_argument("--json", action="store_true", help="print the configuration's plan as JSON")
    return parser


def _as_json(options: argparse.Namespace, model: nn.Module) -> str:
    made = plan(model, options.config, options.num_ranks, options.ranks_per_host)
    every: dict[str, Any] = {
        "per_rank": _lines(made),
        "phases": made.phases,
        "host": made.host_bytes,
        "disk": made.host_file_bytes,
        "activations": made.activation_bytes,
    }
    if isinstance(made, MeshPlan):
        every["mesh"] = dataclasses.asdict(made.mesh)
        every["stages"] = [{"per_rank": _lines(stage), "phases": stage.phases} for stage in made.stages]
    return json.dumps(every)


def _lines(made: MemoryPlan) -> dict[str, dict[str, int]]:
    return {
        line.role: {
            "memory": line.memory_bytes,
            "late": line.late_bytes,
            "files": line.file_bytes,
            "off_device": line.off_device_bytes,
        }
        for line in made.core.lines
    }


def _machine(machine: _C.MachineLimits) -> list[str]:
    rows = ["", f"this machine: {machine.memory_bytes / _GIB:.2f} GiB of memory ({machine.bound})"]
    rows += [f"{each.free_bytes / _GIB:.2f} GiB free in {each.folder}, for files" for each in machine.folders]
    if machine.shared_memory_bytes is not None:
        shared = machine.shared_memory_bytes / _GIB
        rows += [f"{shared:.2f} GiB free in /dev/shm, for workers of data loaders; the engine puts nothing there"]
    if machine.lockable_bytes is not None:
        rows += [f"{machine.lockable_bytes / _GIB:.2f} GiB may be locked per process; the engine locks nothing"]
    return rows


def _recommendation(found: list[Choice], machine: _C.MachineLimits) -> str:
    rows = _machine(machine)
    rows += [f"{'setting':<52}{'per host':>12}{'files':>12}"]
    for choice in found:
        memory, files = choice.plan.host_bytes / _GIB, choice.plan.host_file_bytes / _GIB
        rows.append(f"{choice.name:<52}{memory:8.2f} GiB{files:8.2f} GiB  {choice.why_not or 'fits'}")
    first = next((choice for choice in found if choice.fits), None)
    if first is None:
        cure = "" if machine.folders else "; name folders for files with --nvme_path"
        rows.append(f"nothing fits, before activations: use more hosts or a smaller model{cure}")
    else:
        sections = [f'"{name}": {json.dumps(section)}' for name, section in first.sections.items()]
        rows.append(f"recommended: {', '.join(sections)}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.params and not options.layers:
        parser.error("--params needs --layers")
    torch.set_num_threads(1)
    try:
        model = _build(options)
        if options.json:
            print(_as_json(options, model))
            return 0
        made = plan(model, options.config, options.num_ranks, options.ranks_per_host)
        print(made)
        if isinstance(made, MeshPlan):
            return 0  # which stages and placements fit is searched for data alone
        folders = options.nvme_path or _C.offload_folders(load_config(options.config))
        machine = _C.machine_limits(folders)
        print(
            _recommendation(choices(model, options.config, options.num_ranks, options.ranks_per_host, machine), machine)
        )
    except (ConfigError, ValueError) as error:
        print(f"deeptide plan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
