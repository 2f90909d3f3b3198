# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""redundancy_clean: what training left out or rounded becomes final, and shapes shrink where others follow.

Shapes: a mask of outputs or heads is bool, (N,); what is kept is indexed along the weight's dimension of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deeptide._C import ConfigError
from deeptide.compression.layers import CompressedLayer, restore
from deeptide.compression.preparation import refuse_mpu, unwrapped
from deeptide.compression.section import Group, groups_of, matching
from deeptide.compression.techniques import Pruning
from deeptide.config import ConfigSource, load_config


def redundancy_clean(model: nn.Module, deepspeed_config: ConfigSource, mpu: object = None) -> nn.Module:
    """Makes compression final: weights are rounded and zeros are written; returns the model.

    Where a group names related_modules, rows, heads or channels are removed, and the inputs of those modules with
    them. Call it on a model that init_compression prepared and whose state dict was loaded; of an engine's model, on
    `engine.snapshot()`. Layers whose inputs stay quantised stay compressed layers. Errors: ConfigError.
    """
    groups = groups_of(load_config(deepspeed_config))
    plain = unwrapped(model, "redundancy_clean")
    refuse_mpu(mpu, "redundancy_clean")
    with torch.no_grad():
        for group in groups:
            for number, pattern in enumerate(group.modules):
                related = group.related[number] if group.related else []
                _clean(plain, group, matching(plain, group, pattern), related)
    for module in list(plain.modules()):
        if isinstance(module, CompressedLayer):
            restore(module)
    return model


def _clean(model: nn.Module, group: Group, names: list[str], related: list[str]) -> None:
    masks = []
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, CompressedLayer):
            raise ConfigError(
                f"redundancy_clean: {name} was not prepared; call init_compression with the same configuration first"
            )
        if group.technique == "weight_quantization":
            _round(layer)
        elif group.technique != "activation_quantization":
            masks.append(_prune(layer, name, group, shrink=bool(related)))
    for pattern in related:
        others = matching(model, group, pattern, "related_modules")
        if len(others) != len(names):
            raise ConfigError(
                f"{group.path}.related_modules: {pattern!r} names {len(others)} modules, expected one for each of the "
                f"{len(names)} that are pruned"
            )
        for name, mask in zip(others, masks, strict=True):
            _follow(model.get_submodule(name), name, group, mask)


def _round(layer: CompressedLayer) -> None:
    quantization = layer._compression.weight
    if quantization is not None:
        layer.weight.data = quantization.values(layer.weight)  # type: ignore[arg-type]
        layer._compression.weight = None


def _prune(layer: CompressedLayer, name: str, group: Group, shrink: bool) -> Tensor:
    """The mask by which others follow."""
    pruning = next((one for one in layer._compression.pruning if one.technique == group.technique), None)
    if pruning is None:
        raise ConfigError(f"redundancy_clean: {name} has no {group.technique}; it was made final already")
    mask = pruning.mask(layer).detach().bool().view(-1)
    if not shrink:
        weight, bias = pruning.values(layer, layer.weight, layer.bias)  # type: ignore[arg-type]
        layer.weight.data = weight.detach()
        if bias is not None:
            layer.bias.data = bias.detach()
    elif group.technique == "head_pruning":
        _keep_inputs(layer, mask.repeat_interleave(layer.weight.size(1) // pruning.heads))  # type: ignore[operator]
    else:
        _keep_outputs(layer, name, mask)
    _forget(layer, pruning)
    return mask


def _forget(layer: CompressedLayer, pruning: Pruning) -> None:
    pruning.forget(layer)
    layer._compression.pruning.remove(pruning)


def _follow(module: nn.Module, name: str, group: Group, mask: Tensor) -> None:
    """A module that takes or makes what was removed."""
    if isinstance(module, nn.BatchNorm2d):
        _keep_features(module, mask)
    elif group.technique == "head_pruning":
        size = module.weight.size(0) // mask.numel()  # type: ignore[operator]
        _keep_outputs(module, name, mask.repeat_interleave(size))
    else:
        _keep_inputs(module, mask)


def _keep_outputs(module: nn.Module, name: str, mask: Tensor) -> None:
    if getattr(module, "groups", 1) != 1:
        raise ConfigError(f"redundancy_clean: {name} is a grouped convolution, whose channels could not be removed")
    _shrink(module, "weight", module.weight[mask])  # type: ignore[index]
    if module.bias is not None:
        _shrink(module, "bias", module.bias[mask])  # type: ignore[index]
    module.__dict__["out_channels" if isinstance(module, nn.Conv2d) else "out_features"] = int(mask.sum())


def _keep_inputs(module: nn.Module, mask: Tensor) -> None:
    _shrink(module, "weight", module.weight[:, mask])  # type: ignore[index]
    module.__dict__["in_channels" if isinstance(module, nn.Conv2d) else "in_features"] = int(mask.sum())


def _keep_features(module: nn.BatchNorm2d, mask: Tensor) -> None:
    if module.affine:
        _shrink(module, "weight", module.weight[mask])
        _shrink(module, "bias", module.bias[mask])
    if module.running_mean is not None and module.running_var is not None:
        module.running_mean, module.running_var = module.running_mean[mask], module.running_var[mask]
    module.num_features = int(mask.sum())


def _shrink(module: nn.Module, name: str, values: Tensor) -> None:
    old: nn.Parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(values.contiguous(), requires_grad=old.requires_grad))
