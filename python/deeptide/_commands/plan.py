# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells what an engine would take of memory, disk and links, and which stage, placement and mesh fit."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
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
from deeptide._forecast.gpt import GPT, heads_for, layers_for, width_for
from deeptide._forecast.meshes import MeshChoice, Search, reason
from deeptide._forecast.plan import Choice, MemoryPlan, MeshPlan, choices, plan
from deeptide._forecast.plan_mesh import mesh_of
from deeptide._forecast.steps import Rates
from deeptide.activations.choice import bytes_of
from deeptide.config import load_config

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_GIB = 2**30


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
        layers = options.layers or layers_for(options.params)
        width = options.hidden or width_for(options.params, layers, options.vocab)
        heads = options.heads or heads_for(width)
        size = f"width {width}, {heads} heads, vocabulary {options.vocab}"
        print(f"a transformer of {layers} layers, {size}, tied head")
        return GPT(layers, width, heads, options.vocab)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deeptide plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="the ds_config.json")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-file", metavar="FILE.py:FUNCTION", help="a function that returns the model")
    model.add_argument("--params", type=_count, metavar="N", help="a transformer of about so many: 350M, 7B")
    parser.add_argument("--layers", type=int, metavar="N", help="its layers; without it, those of published models")
    parser.add_argument("--hidden", type=int, metavar="N", help="its width; without it, --params decides")
    parser.add_argument("--heads", type=int, metavar="N", help="its heads; without it, of 128 each, or 64")
    parser.add_argument("--vocab", type=int, default=50304, metavar="N", help="its vocabulary (50304)")
    parser.add_argument("--num_ranks", type=int, default=1, metavar="N", help="ranks of the job (1)")
    parser.add_argument("--ranks_per_host", type=int, metavar="N", help="of these, on each host (all)")
    parser.add_argument("--nvme_path", action="append", metavar="FOLDER", help="a folder that may hold files")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sample: forecasts activations and transfers")
    _add_search(parser)
    parser.add_argument("--json", action="store_true", help="print the configuration's plan as JSON")
    return parser


def _add_search(parser: argparse.ArgumentParser) -> None:
    rates = Rates()
    group = parser.add_argument_group("steps", "their time, and the fastest mesh that fits, with --seq; of one rank:")
    group.add_argument("--mesh", action="store_true", help="recommend one for the configuration's train_batch_size")
    group.add_argument("--memory", type=_bytes, metavar="SIZE", help="of a rank: 80GB (this machine's share)")
    for name, text in (
        ("flops", "products in a second, in the model's own shapes"),
        ("within", "bytes sent to ranks of the host in a second"),
        ("between", "bytes sent to other hosts in a second"),
        ("memory_rate", "bytes that the optimizer reads and writes in a second"),
    ):
        default = getattr(rates, name.removesuffix("_rate"))
        group.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"{text} ({default:g})")


def _bytes(text: str) -> int:
    count = bytes_of(text if text.endswith("B") else text + "B")
    if count is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a size such as 80GB or 64GiB")
    return count


def _batch(options: argparse.Namespace, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """One micro-batch of the configuration's size, of shapes alone."""
    if options.seq is None:
        return None
    names = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= set(names):
        raise ConfigError(
            f"--seq: {type(model).__name__}.forward takes {', '.join(names)}, expected input_ids and labels; give "
            "deeptide.plan its batch in Python"
        )
    config = load_config(options.config)
    samples = config.batch_sizes(mesh_of(config, options.num_ranks).data).micro if not options.mesh else 1
    tokens = torch.empty((samples, options.seq), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _rates(options: argparse.Namespace) -> Rates:
    return Rates(options.flops, options.within, options.between, options.memory_rate)


def _search(options: argparse.Namespace, model: nn.Module, batch: dict[str, torch.Tensor] | None) -> str:
    if batch is None:
        raise ConfigError("--mesh needs --seq: activations and time depend on the tokens of a sample")
    config = load_config(options.config)
    on_host = options.ranks_per_host or options.num_ranks
    memory = options.memory or _C.machine_limits([]).memory_bytes // on_host
    rates = _rates(options)
    return _meshes(Search(model, config, options.num_ranks, on_host, batch, rates).run(memory), rates, memory, options)


def _meshes(found: list[MeshChoice], rates: Rates, memory: int, options: argparse.Namespace) -> str:
    ranks, on_host = options.num_ranks, options.ranks_per_host or options.num_ranks
    rows = [f"{ranks} ranks, {on_host} per host, {memory / _GIB:.2f} GiB each", ""]
    columns = f"{'states':>11}{'activations':>13}{'step':>10}{'tokens/s':>11}{'Tflop/s':>9}"
    rows += [f"{'mesh, micro-batches x samples':<84}{columns}"]
    for choice in found:
        kept = f"{choice.state_bytes / _GIB:7.2f} GiB{choice.activation_bytes / _GIB:9.2f} GiB"
        if choice.step is None:
            rows.append(f"{choice!s:<84}{kept}  {choice.why_not}")
            continue
        seconds = choice.step.seconds
        speed = f"{seconds:8.2f} s{choice.step.tokens / seconds:11.0f}{choice.flops / seconds / ranks / 1e12:9.2f}"
        rows.append(f"{choice!s:<84}{kept}{speed}")
    if not found:
        return "\n".join([*rows, "no mesh divides train_batch_size among these ranks; choose another one"])
    first = found[0]
    if first.step is None:
        return "\n".join([*rows, "no mesh fits: the one above comes nearest; use more ranks, or a smaller model"])
    sections = [f'"{name}": {json.dumps(section)}' for name, section in first.sections.items()]
    return "\n".join([*rows, "", f"the first: {reason(first, rates)}", f"recommended: {', '.join(sections)}"])


def _as_json(options: argparse.Namespace, model: nn.Module) -> str:
    batch = _batch(options, model)
    made = plan(model, options.config, options.num_ranks, options.ranks_per_host, batch=batch, rates=_rates(options))
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
    if made.step is not None:
        every["step"] = dataclasses.asdict(made.step)
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
    torch.set_num_threads(1)
    try:
        model = _build(options)
        if options.json:
            print(_as_json(options, model))
            return 0
        batch = _batch(options, model)
        if options.mesh:
            print(_search(options, model, batch))
            return 0
        made = plan(
            model, options.config, options.num_ranks, options.ranks_per_host, batch=batch, rates=_rates(options)
        )
        print(made)
        if isinstance(made, MeshPlan):
            return 0  # which stages and placements fit is searched for data alone, and meshes by --mesh
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
