# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters are optimized, by which kernel, with which hyper-parameters: from what the caller gave."""

from dataclasses import dataclass, field

import torch

from deeptide import _C
from deeptide._C import ConfigError, Hyperparameters, OptimizerKind

# Each kind's keys in a torch param group, and how our hyper-parameters spell them.
_KEYS = {
    OptimizerKind.adam: {
        "lr": "lr",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "bias_correction": "bias_correction",
        "decoupled_weight_decay": "decoupled_decay",
    },
    OptimizerKind.sgd: {
        "lr": "lr",
        "momentum": "momentum",
        "dampening": "dampening",
        "weight_decay": "weight_decay",
        "nesterov": "nesterov",
    },
}
_FLAGS = ("bias_correction", "decoupled_weight_decay", "nesterov")
# Keys that say how torch would compute, not what; ours replaces that. "initial_lr" is a torch scheduler's.
_HARMLESS = {"params", "param_names", "name", "initial_lr", "foreach", "fused", "capturable"}
_CHANGES_THE_MATH = ("amsgrad", "maximize", "differentiable")
_CLASSES = {
    torch.optim.Adam: OptimizerKind.adam,
    torch.optim.AdamW: OptimizerKind.adam,
    torch.optim.SGD: OptimizerKind.sgd,
}


@dataclass
class OptimizerPlan:
    """The kernel, the live param groups, and for each group of the core: its index there and its parameters' names."""

    kind: OptimizerKind
    param_groups: list
    names: list = field(default_factory=list)  # [(index in param_groups, [name, ...])]; empty groups are left out
    override: OptimizerKind | None = None  # the kind when it is not the configuration's

    def core_groups(self, defaults):
        """The same for the core."""
        return [
            _C.ParameterGroup(names, read_group(self.param_groups[index], self.kind, defaults))
            for index, names in self.names
        ]


def read_group(group, kind, defaults):
    """A live group as Hyperparameters; what the group does not say is the default's."""
    values = Hyperparameters(defaults)
    for key, attribute in _KEYS[kind].items():
        if key in group:
            setattr(values, attribute, bool(group[key]) if key in _FLAGS else float(group[key]))
    if kind == OptimizerKind.adam and "betas" in group:
        values.beta1, values.beta2 = (float(beta) for beta in group["betas"])
    return values


def write_group(group, kind, values):
    """The core's hyper-parameters into a live group; an lr that is a tensor stays that tensor."""
    for key, attribute in _KEYS[kind].items():
        value = getattr(values, attribute)
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
    if kind == OptimizerKind.adam:
        group["betas"] = (values.beta1, values.beta2)


def _plain_groups(parameters):
    """`model_parameters` as param-group dicts: parameters, (name, parameter) pairs or dicts, as torch takes them."""
    if isinstance(parameters, torch.Tensor):
        raise ConfigError("model_parameters: got a tensor, expected an iterable of parameters or of groups")
    items = list(parameters)
    if not items:
        raise ConfigError("model_parameters is empty; give the model's parameters, or leave it out for all of them")
    if not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups = []
    for number, item in enumerate(items):
        if "params" not in item:
            raise ConfigError(f"model_parameters: group {number} has no 'params'; it has {sorted(item)}")
        params = item["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        groups.append({**item, "params": [p[1] if isinstance(p, tuple) else p for p in params]})
    return groups


def _check_keys(groups, kind):
    known = {*_KEYS[kind], *_HARMLESS, *_CHANGES_THE_MATH}
    if kind == OptimizerKind.adam:
        known.add("betas")
    for number, group in enumerate(groups):
        for key in _CHANGES_THE_MATH:
            if group.get(key):
                raise ConfigError(f"optimizer group {number}: {key}={group[key]!r} is not supported yet; leave it out")
        for key in group:
            if key not in known:
                raise ConfigError(
                    f"optimizer group {number}: unknown key {key!r}; {kind.name} knows {', '.join(sorted(known))}"
                )


def _check_numbers(groups):
    for number, group in enumerate(groups):
        for key in ("lr", "eps", "weight_decay", "momentum"):
            value = group.get(key)
            if value is not None and not float(value) >= 0.0:
                raise ConfigError(f"optimizer group {number}: {key}={value!r}, expected a number of at least 0")
        for beta in group.get("betas", ()):
            if not 0.0 <= float(beta) < 1.0:
                raise ConfigError(f"optimizer group {number}: betas={group['betas']!r}, expected both in [0, 1)")


def _name_groups(groups, model_names):
    """[(group's index, names)] of the trainable parameters. Errors: a parameter not of the model, or given twice."""
    seen, named = {}, []
    for number, group in enumerate(groups):
        names = []
        for position, parameter in enumerate(group["params"]):
            name = model_names.get(id(parameter))
            if name is None:
                shape = tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else type(parameter).__name__
                raise ConfigError(
                    f"optimizer group {number}: parameter {position} of shape {shape} is not one of the model's; "
                    "build the groups from the model that is given to deeptide.initialize"
                )
            if name in seen:
                raise ConfigError(
                    f"parameter '{name}' is given twice: in optimizer group {seen[name]} and in group {number}"
                )
            seen[name] = number
            if parameter.requires_grad:
                names.append(name)
        if names:
            named.append((number, names))
    if not named:
        raise ConfigError(
            "no trainable parameter is left to optimize: the model has none, or all given have requires_grad=False"
        )
    return named


def _plan_of_instance(optimizer, model_names):
    kind = _CLASSES.get(type(optimizer))
    if kind is None:
        raise ConfigError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported yet; "
            'expected torch.optim.Adam, AdamW or SGD, or the configuration\'s "optimizer" section'
        )
    if optimizer.state:
        raise ConfigError(
            "the optimizer has already stepped, and its moments would be lost; "
            "give a fresh one and load its state from a checkpoint"
        )
    groups = optimizer.param_groups
    _check_keys(groups, kind)
    _check_numbers(groups)
    for group in groups:
        if kind == OptimizerKind.adam:
            group.setdefault("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    return OptimizerPlan(kind, groups, _name_groups(groups, model_names), override=kind)


def plan_optimizer(model, model_names, config, optimizer=None, model_parameters=None):
    """The plan for what the caller gave; None when neither the caller nor the configuration names an optimizer."""
    if model_parameters is not None:
        model_parameters = _plain_groups(model_parameters)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        parameters = model_parameters or [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _plan_of_instance(optimizer, model_names)
    if optimizer is not None:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer "
            "or a function that makes one from parameters"
        )
    kind = config.optimizer.kind
    if kind == OptimizerKind.none:
        return None
    groups = model_parameters or [{"params": [p for p in model.parameters() if p.requires_grad]}]
    _check_keys(groups, kind)
    _check_numbers(groups)
    plan = OptimizerPlan(kind, groups, _name_groups(groups, model_names))
    for group in groups:
        write_group(group, kind, read_group(group, kind, config.optimizer.defaults))
    return plan
