# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA around layers that are cut: one of its two factors is cut as they are, the other one stays whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from deeptide._C import ConfigError
from deeptide.tensor.cutting.plans import COLUMN, ROW, Cut, Plan

_BASE = ".base_layer"


def layer_named(path: str) -> str:
    """The path by which the model's author knows a layer: an adapter puts it one level down."""
    return path.removesuffix(_BASE)


def is_adapters(path: str) -> bool:
    """Whether the layer is a factor of an adapter."""
    return ".lora_A." in path or ".lora_B." in path


def _copies_of(path: str, module: nn.Module) -> list[str]:
    """The paths of a layer and of what is trained in its place, where an adapter has it in modules_to_save."""
    if not {"original_module", "modules_to_save"} <= module._modules.keys():
        return []
    copies: Any = module._modules["modules_to_save"]
    return [f"{path}.original_module", *(f"{path}.modules_to_save.{name}" for name in copies)]


def has_adapters(model: nn.Module) -> bool:
    """Whether layers have adapters around them."""
    return any("base_layer" in module._modules for module in model.modules())


def with_adapters(model: nn.Module, plan: Plan) -> Plan:
    """Moves cuts to the layers within adapters, and cuts those. Errors: ConfigError for adapters of other kinds.

    Columns: whole features of a low rank go to each rank's outputs, B's columns, and come back as one sum. Rows: each
    rank's inputs meet its part of A, whose sum is of the low rank, and B is whole.
    """
    modules = dict(model.named_modules())
    found: Plan = {}
    for path, cut in plan.items():
        copies = _copies_of(path, modules[path])
        if copies:
            found |= dict.fromkeys(copies, cut)
            continue
        wrapper: Any = modules.get(layer_named(path))
        if wrapper is None or "base_layer" not in wrapper._modules:
            found[path] = cut
            continue
        name = layer_named(path)
        found[name + _BASE] = cut
        if "lora_A" not in wrapper._modules or len(getattr(wrapper, "lora_magnitude_vector", ())) > 0:
            raise ConfigError(
                f"'{name}' is cut among ranks and has an adapter of the kind {type(wrapper).__name__} that is not "
                'supported there; LoRA is. Leave the layer whole by "skip" in tensor_parallel.partition_config'
            )
        if cut.kind in (COLUMN, ROW):
            factor = "lora_B" if cut.kind == COLUMN else "lora_A"
            for adapter in wrapper._modules[factor]:
                found[f"{name}.{factor}.{adapter}"] = Cut(cut.kind, cut.meets_whole, cut.blocks)
    return found
