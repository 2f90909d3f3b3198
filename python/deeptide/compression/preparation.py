# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""init_compression: layers get their techniques, a student gets its teacher's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deeptide._C import ConfigError
from deeptide.compression.layers import Techniques, techniques_of
from deeptide.compression.section import SECTION, Group, assigned, groups_of, read_section
from deeptide.compression.techniques import ActivationQuantization, ActivationRange, Pruning, WeightQuantization
from deeptide.config import ConfigSource, load_config


def unwrapped(model: nn.Module, what: str) -> nn.Module:
    """The model itself, out of a wrapper's `module`. Errors: ConfigError for an engine."""
    from deeptide.engine import Engine

    if isinstance(model, Engine):
        raise ConfigError(f"{what} was given an engine; call it on the model, before initialize")
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def refuse_mpu(mpu: object, what: str) -> None:
    """Errors: ConfigError for a model that is parallel within layers."""
    if mpu is not None:
        raise ConfigError(f"{what}: mpu is given, and there is no tensor parallelism here; leave it out")


def init_compression(
    model: nn.Module, deepspeed_config: ConfigSource, teacher_model: nn.Module | None = None, mpu: object = None
) -> nn.Module:
    """Gives layers what "compression_training" says; returns the model. Call it before `initialize`.

    Layers stay the same objects and their parameters keep their names; masks become buffers, and scores of "topk"
    parameters, under DeepSpeed's names. Nothing is compressed before a technique's schedule_offset, which the engine
    follows. A reduction of layers copies the teacher's. Errors: ConfigError naming the key.
    """
    config = load_config(deepspeed_config)
    section = read_section(config)
    plain = unwrapped(model, "init_compression")
    refuse_mpu(mpu, "init_compression")
    if section["layer_reduction"]["enabled"]:
        if teacher_model is None:
            raise ConfigError(
                f"{SECTION}.layer_reduction.enabled: true needs a teacher; give init_compression teacher_model"
            )
        _copy_layers(plain, unwrapped(teacher_model, "init_compression"), section["layer_reduction"])
    modules = dict(plain.named_modules())
    for number, (group, name) in enumerate(list(assigned(plain, groups_of(config)))):
        _add(modules[name], name, group, number)
    return model


def _add(layer: nn.Module, name: str, group: Group, number: int) -> None:
    techniques = techniques_of(layer, name)
    params, offset = group.params, group.params["schedule_offset"]
    if group.technique == "weight_quantization":
        techniques.weight = _weight_quantization(layer, name, group, number)
    elif group.technique == "activation_quantization":
        static = params["range_calibration"] == "static"
        if static:
            layer.activation_quantizer = ActivationRange(layer.weight)  # type: ignore[arg-type]
        techniques.activation = ActivationQuantization(
            params["bits"], params["quantization_type"] == "symmetric", static, offset
        )
    else:
        heads = params.get("num_heads") or 0
        columns = layer.weight.size(-1) if heads else 0  # type: ignore[operator]
        if heads and columns % heads:
            raise ConfigError(
                f"{group.path}.modules: {name} has {columns} inputs, which num_heads, {heads}, does not divide"
            )
        pruning = Pruning(group.technique, params["method"] == "topk", params["dense_ratio"], offset, heads)
        _put(techniques, pruning, layer, name)


def _put(techniques: Techniques, pruning: Pruning, layer: nn.Module, name: str) -> None:
    if any(other.technique == pruning.technique for other in techniques.pruning):
        raise ConfigError(f"init_compression: {name} has {pruning.technique} already; call it once for a model")
    pruning.prepare(layer)
    techniques.pruning.append(pruning)


def _weight_quantization(layer: nn.Module, name: str, group: Group, number: int) -> WeightQuantization:
    params = group.params
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    in_forward = params["quantize_weight_in_forward"]
    groups = params["quantize_groups"]
    if in_forward and isinstance(layer, nn.Embedding):
        groups = weight.size(0)  # each row by itself, as DeepSpeed does
    if weight.numel() % groups:
        raise ConfigError(
            f"{SECTION}.weight_quantization.shared_parameters.quantize_groups: {groups} does not divide the "
            f"{weight.numel()} elements of {name}"
        )
    return WeightQuantization(
        bits=params["target_bits"] if in_forward else params["start_bits"],
        target_bits=params["target_bits"],
        period=params["quantization_period"],
        groups=groups,
        symmetric=params["quantization_type"] == "symmetric",
        stochastic=params["rounding"] == "stochastic",
        in_forward=in_forward,
        offset=params["schedule_offset"],
        number=number,
    )


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: ConfigSource) -> None:
    """Copies the layers that "layer_reduction" names from the teacher. Errors: ConfigError."""
    section = read_section(load_config(deepspeed_config))["layer_reduction"]
    _copy_layers(student_model, teacher_model, section)


def _copy_layers(student: nn.Module, teacher: nn.Module, section: dict[str, Any]) -> None:
    path = f"{SECTION}.layer_reduction"
    prefix, layers = section.get("module_name_prefix"), section.get("teacher_layer") or []
    if not prefix or not layers:
        raise ConfigError(f"{path}: needs module_name_prefix and teacher_layer; give both")
    count = section.get("keep_number_layer")
    if count is not None and count != len(layers):
        raise ConfigError(
            f"{path}.keep_number_layer: got {count}, and teacher_layer names {len(layers)}; make them equal"
        )
    pairs = [(f"{prefix}.{number}", f"{prefix}.{layer}") for number, layer in enumerate(layers)]
    pairs += [(name, name) for name in section.get("other_module_name") or []]
    for name, source in pairs:
        _copy(_found(student, name, "student", path), _found(teacher, source, "teacher", path), name, path)


def _found(model: nn.Module, name: str, whose: str, path: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ConfigError(f"{path}: the {whose} has no module {name}; give a name that both models have") from None


def _copy(student: nn.Module, teacher: nn.Module, name: str, path: str) -> None:
    theirs = dict(teacher.named_parameters())
    for key, parameter in student.named_parameters():
        source = theirs.get(key)
        if source is None or source.shape != parameter.shape:
            got = "none" if source is None else str(list(source.shape))
            raise ConfigError(
                f"{path}: the student's {name}.{key} has the shape {list(parameter.shape)}, the teacher's {got}; "
                "layers must be alike"
            )
        with torch.no_grad():
            parameter.copy_(source)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replaces modules whose weight is (I, O), such as GPT-2's Conv1D, by torch's Linear; returns the model."""
    plain = unwrapped(model, "convert_conv1d_to_linear")
    for name, module in list(plain.named_modules()):
        if not isinstance(module, convert_type):
            continue
        weight, bias = module.weight, module.bias
        linear = nn.Linear(weight.size(0), weight.size(1), bias is not None, weight.device, weight.dtype)  # type: ignore[operator]
        with torch.no_grad():
            linear.weight.copy_(weight.t())  # type: ignore[operator]
            if bias is not None:
                linear.bias.copy_(bias.view(-1))  # type: ignore[operator]
        parent, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(parent), leaf, linear)
    return model
