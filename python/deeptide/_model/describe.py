# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a Python model to the core."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._model.names import inner_of, namer


def check_model(model: object) -> torch.nn.Module:
    """Returns `model`; raises ConfigError unless it is a torch.nn.Module whose gradients nobody else sums."""
    if model is None:
        raise ConfigError("deeptide.initialize requires a model: got None, expected a torch.nn.Module")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    _refuse_other_engines(model)
    return model


def _refuse_other_engines(model: torch.nn.Module) -> None:
    """Errors: ConfigError for modules that DDP or FSDP has, and for parameters that torch has made DTensors."""
    for path, module in model.named_modules():
        other = "DistributedDataParallel" if isinstance(module, torch.nn.parallel.DistributedDataParallel) else ""
        if "_fsdp_wrapped_module" in module._modules:
            other = "FullyShardedDataParallel"
        if other:
            raise ConfigError(
                f"model: {repr(path) if path else 'it'} is wrapped in {other}, which sums gradients over the ranks "
                "itself, as the engine does; give the module that it wraps"
            )
    shared_out = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # not loaded: nobody has one
    for name, parameter in model.named_parameters():
        if isinstance(parameter, shared_out):
            raise ConfigError(
                f"model: parameter {name!r} is a DTensor, which torch has shared out over ranks (fully_shard, "
                'parallelize_module); give the whole model: "zero_optimization" and "parallel" share it out'
            )


def parameter_names(model: torch.nn.Module) -> dict[int, str]:
    """{id of a parameter: its first name}."""
    names: dict[int, str] = {}
    plain = namer(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), plain(name))
    return names


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's parameters; the engine works there."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def describe(
    model: torch.nn.Module, held: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None
) -> _C.ModelDescription:
    """The model's parameters, buffers and modules by name, every name of a shared one. Wrappers are left out.

    held(name, parameter): what a rank has in its place; None: nothing.
    """
    plain = namer(model)
    parameters: list[tuple[str, torch.Tensor]] = [
        (plain(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    if held is not None:
        mine = [(name, held(name, parameter)) for name, parameter in parameters]
        parameters = [(name, parameter) for name, parameter in mine if parameter is not None]
    modules: list[tuple[str, str]] = []
    buffers: list[tuple[str, torch.Tensor]] = []
    transient: list[tuple[str, torch.Tensor]] = []
    in_fp32: list[tuple[str, str, bool]] = []
    for wrapped, module in model.named_modules(remove_duplicate=False):
        path = plain(wrapped)
        if not inner_of(module):
            modules.append((path, type(module).__name__))
        in_fp32 += _wanted_in_fp32(path, module)
        for name, buffer in module.named_buffers(recurse=False):
            kind = transient if name in module._non_persistent_buffers_set else buffers
            kind.append((f"{path}.{name}" if path else name, buffer))
    return _C.ModelDescription(parameters, buffers, modules, transient, in_fp32)


def _wanted_in_fp32(path: str, module: torch.nn.Module) -> Iterator[tuple[str, str, bool]]:
    """The modules that a class of Transformers names for fp32, in every 16-bit type or only in fp16."""
    for attribute, fp16_only in (("_keep_in_fp32_modules_strict", False), ("_keep_in_fp32_modules", True)):
        names = vars(module).get(attribute) or getattr(type(module), attribute, None) or ()
        yield from ((path, name, fp16_only) for name in sorted(names))


def describer(model: torch.nn.Module) -> Callable[[], _C.ModelDescription]:
    """`describe(model)`, for the core to call while its engine lives, which holds the model.

    Weak, because Python's garbage collector does not see what the core holds, and a model may hold its engine.
    """
    weak: Any = weakref.proxy(model)  # to be used as the model is
    return functools.partial(describe, weak)


@contextlib.contextmanager
def whole_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Around the end of an engine: parameters that were sharded are whole, and the program's own, afterwards."""
    with torch.no_grad():
        wholes = [(p, p.detach().clone()) for p in model.parameters() if _C.is_sharded(p)]
    yield
    for parameter, whole in wholes:
        parameter.data = whole
