# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters are optimized, by which optimizer, with which hyper-parameters: from what the caller gave."""

import functools
from dataclasses import dataclass, field

import torch

from deeptide import _C
from deeptide._C import ConfigError, Hyperparameters

# Keys that say how torch would compute, not what; ours replaces that. "initial_lr" is a torch scheduler's.
_HARMLESS = {"params", "param_names", "name", "initial_lr", "foreach", "fused", "capturable"}
_CHANGES_THE_MATH = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")


@dataclass
class OptimizerPlan:
    """The optimizer, the live param groups, and per group of the core its index there and its parameters' names."""

    info: _C.OptimizerInfo
    param_groups: list
    names: list = field(default_factory=list)  # [(index in param_groups, [name, ...])]; empty groups are left out
    override: str | None = None  # the optimizer's type when it is not the configuration's

    def core_groups(self, defaults):
        """The same for the core."""
        return [
            _C.ParameterGroup(names, read_group(self.param_groups[index], self.info, defaults))
            for index, names in self.names
        ]


@functools.cache
def _keys_of(name):
    """{key of a torch param group: its numbers}, from the configuration's table; several numbers are a tuple there."""
    keys = {}
    for number in _C.find_optimizer(name).hyperparameters:
        keys.setdefault(number.group_key, []).append(number)
    return keys


def _values_of(key, numbers, group):
    """A group's value of `key`, one entry per number."""
    values = group[key] if numbers[0].element >= 0 else (group[key],)
    if len(values) != len(numbers):
        raise ConfigError(f"optimizer group: {key}={group[key]!r}, expected {len(numbers)} numbers")
    return values


def read_group(group, info, defaults):
    """A live group as Hyperparameters; what the group does not say is the default's, if those are this optimizer's."""
    same = defaults.optimizer is not None and defaults.optimizer.name == info.name
    values = Hyperparameters(defaults) if same else Hyperparameters(info.name)
    for key, numbers in _keys_of(info.name).items():
        if key in group:
            for number, value in zip(numbers, _values_of(key, numbers, group), strict=True):
                values[number.name] = float(bool(value)) if number.flag else float(value)
    return values


def write_group(group, info, values):
    """The core's hyper-parameters into a live group; an lr that is a tensor stays that tensor."""
    for key, numbers in _keys_of(info.name).items():
        held = [bool(values[number.name]) if number.flag else values[number.name] for number in numbers]
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(held[0])
        else:
            group[key] = held[0] if numbers[0].element < 0 else tuple(held)


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


def _check_keys(groups, info):
    known = {*_keys_of(info.name), *_HARMLESS, *_CHANGES_THE_MATH}
    for number, group in enumerate(groups):
        for key in _CHANGES_THE_MATH:
            if group.get(key):
                raise ConfigError(f"optimizer group {number}: {key}={group[key]!r} is not supported yet; leave it out")
        for key in group:
            if key not in known:
                raise ConfigError(
                    f"optimizer group {number}: unknown key {key!r}; {info.name} knows {', '.join(sorted(known))}"
                )


def _fits(value, number):
    above = number.lowest is None or float(value) >= number.lowest
    if number.highest is None:
        return above
    return above and (float(value) < number.highest if number.highest_excluded else float(value) <= number.highest)


def _range_text(numbers):
    first = numbers[0]
    if first.highest is None:
        return f"a number of at least {first.lowest:g}"
    interval = f"[{first.lowest:g}, {first.highest:g}{')' if first.highest_excluded else ']'}"
    return f"both in {interval}" if len(numbers) == 2 else f"all in {interval}" if first.element >= 0 else interval


def _check_numbers(groups, info):
    for position, group in enumerate(groups):
        for key, numbers in _keys_of(info.name).items():
            if group.get(key) is None:
                continue
            values = _values_of(key, numbers, group)
            if not all(_fits(value, number) for value, number in zip(values, numbers, strict=True)):
                raise ConfigError(f"optimizer group {position}: {key}={group[key]!r}, expected {_range_text(numbers)}")


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


def _info_of_instance(optimizer):
    """The table's optimizer of the same name, for one of torch's own classes."""
    taken = {}
    for info in _C.optimizers():
        taken.update({getattr(torch.optim, type): info for type in info.types if hasattr(torch.optim, type)})
    if type(optimizer) in taken:
        return taken[type(optimizer)]
    names = [kind.__name__ for kind in taken]
    raise ConfigError(
        f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported yet; "
        f'expected torch.optim.{", ".join(names[:-1])} or {names[-1]}, or the configuration\'s "optimizer" section'
    )


def _has_stepped(optimizer):
    """Adagrad has its state from the start, at step 0."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _plan_of_instance(optimizer, model_names):
    info = _info_of_instance(optimizer)
    if _has_stepped(optimizer):
        raise ConfigError(
            "the optimizer has already stepped, and its moments would be lost; "
            "give a fresh one and load its state from a checkpoint"
        )
    groups = optimizer.param_groups
    _check_keys(groups, info)
    _check_numbers(groups, info)
    for group in groups:
        if "decoupled_weight_decay" in _keys_of(info.name):
            group.setdefault("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    return OptimizerPlan(info, groups, _name_groups(groups, model_names), override=info.name)


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
    info = config.optimizer.defaults.optimizer
    if info is None:
        return None
    groups = model_parameters or [{"params": [p for p in model.parameters() if p.requires_grad]}]
    _check_keys(groups, info)
    _check_numbers(groups, info)
    plan = OptimizerPlan(info, groups, _name_groups(groups, model_names))
    for group in groups:
        write_group(group, info, read_group(group, info, config.optimizer.defaults))
    return plan
