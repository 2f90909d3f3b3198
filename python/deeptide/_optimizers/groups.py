# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters are optimized, by which optimizer, with which hyper-parameters: from what the caller gave."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError, HyperparameterInfo, Hyperparameters, OptimizerInfo
from deeptide._process.log import say

if TYPE_CHECKING:
    from deeptide._optimizers.custom import PartStepper

ParamGroup: TypeAlias = dict[str, Any]  # as torch's optimizers hold them
OptimizerSource: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
ParametersSource: TypeAlias = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[ParamGroup]

# Keys that torch's schedulers leave for themselves; and those that say how torch would compute, not what.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"}
_HARMLESS = {"params", "param_names", "name", "foreach", "fused", "capturable"} | _OF_SCHEDULERS
# Keys of torch's own optimizers that become a number of ours under another name.
_TRANSLATED = ("adjust_lr_fn",)
_NO_NUMBERS = _HARMLESS | {"differentiable"}
_CHANGES_THE_MATH = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")


@dataclass
class OptimizerPlan:
    """The optimizer, the live param groups, and per group of the core its index there and its parameters' names."""

    info: OptimizerInfo
    param_groups: list[ParamGroup]
    # [(index in param_groups, [name, ...])]; empty groups are left out
    names: list[tuple[int, list[str]]] = field(default_factory=list)
    override: str | None = None  # the optimizer's type when it is not the configuration's
    custom: PartStepper | None = None  # the caller's own, which steps; its groups are then `param_groups`
    every: bool = False  # the groups were made for all trainable parameters, not by the caller
    extra_keys: bool = False  # groups may hold keys of the program's own
    defaults: dict[str, Any] = field(default_factory=dict)  # what the caller's optimizer gives to each of its groups
    left_out: list[torch.Tensor] = field(default_factory=list)  # trainable, but in none of the caller's groups
    given: torch.optim.Optimizer | None = None  # the program's own object
    starts: dict[int, float] = field(default_factory=dict)  # by a group's id: the rate where the schedule begins

    def core_groups(self, config: Config) -> list[_C.ParameterGroup]:
        """The same for the core. A rate that the configuration's schedule moves is the one where it began."""
        groups = []
        for index, names in self.names:
            group = self.param_groups[index]
            values = read_group(group, self.info, config.optimizer.defaults)
            if config.scheduler.type and "lr" in keys_of(self.info):
                values["lr"] = self.starts.setdefault(id(group), values["lr"])
            groups.append(_C.ParameterGroup(names, values))
        return groups

    def note_left_out(self, model: torch.nn.Module) -> None:
        """Notes what of the model is trainable, and in none of the groups."""
        placed = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self.left_out = [p for p in model.parameters() if p.requires_grad and id(p) not in placed]

    def defaults_of(self, group: ParamGroup, config: Config) -> Hyperparameters:
        """The configuration's for a group: Muon has others for what it does not orthogonalize."""
        optimizer = config.optimizer
        return optimizer.defaults if group.get("use_muon", True) else optimizer.rest


class GroupKey(NamedTuple):
    """A key of a torch param group, and the hyper-parameters that its value stands for."""

    key: str
    names: tuple[str, ...]
    several: bool  # the value is a tuple of numbers, one per name
    flag: bool


@functools.cache
def _table_of(info: OptimizerInfo) -> dict[str, list[HyperparameterInfo]]:
    """{key of a torch param group: its numbers}."""
    keys: dict[str, list[HyperparameterInfo]] = {}
    for number in info.hyperparameters:
        keys.setdefault(number.group_key, []).append(number)
    return keys


@functools.cache
def keys_of(info: OptimizerInfo) -> dict[str, GroupKey]:
    """The keys of an optimizer's param groups."""
    return {
        key: GroupKey(key, tuple(number.name for number in numbers), numbers[0].element >= 0, numbers[0].flag)
        for key, numbers in _table_of(info).items()
    }


def numbers_of(key: GroupKey, value: Any) -> list[float]:
    """A group's value of `key`, one number per hyper-parameter. Errors: ConfigError on another number of them."""
    values = value if key.several else (value,)
    if len(values) != len(key.names):
        raise ConfigError(f"optimizer group: {key.key}={value!r}, expected {len(key.names)} numbers")
    return [float(bool(number)) if key.flag else float(number) for number in values]


def read_group(group: ParamGroup, info: OptimizerInfo, defaults: Hyperparameters) -> Hyperparameters:
    """A live group as Hyperparameters; what the group does not say is the default's, if those are this optimizer's."""
    same = defaults.optimizer is not None and defaults.optimizer.name == info.name
    values = Hyperparameters(defaults) if same else Hyperparameters(info)
    for key in keys_of(info).values():
        if key.key in group:
            for name, number in zip(key.names, numbers_of(key, group[key.key]), strict=True):
                values[name] = number
    return values


def write_key(group: ParamGroup, key: GroupKey, numbers: Sequence[float]) -> None:
    """The core's numbers into a live group; an lr that is a tensor stays that tensor."""
    was = group.get(key.key)
    held: Sequence[float] = [bool(number) for number in numbers] if key.flag else numbers
    if type(was) is int and float(numbers[0]).is_integer():
        held = [int(numbers[0])]  # a count stays one: optimizers index and loop by it
    if isinstance(was, torch.Tensor):
        was.fill_(held[0])
    else:
        group[key.key] = tuple(held) if key.several else held[0]


def write_group(group: ParamGroup, info: OptimizerInfo, values: Hyperparameters) -> None:
    """All of the core's hyper-parameters into a live group."""
    for key in keys_of(info).values():
        write_key(group, key, [values[name] for name in key.names])


def _plain_groups(parameters: ParametersSource) -> list[ParamGroup]:
    """`model_parameters` as param-group dicts: parameters, (name, parameter) pairs or dicts, as torch takes them."""
    if isinstance(parameters, torch.Tensor):
        raise ConfigError("model_parameters: got a tensor, expected an iterable of parameters or of groups")
    items: list[Any] = list(parameters)
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


def _numbers_in(groups: list[ParamGroup]) -> list[tuple[str, str, int, bool, float]]:
    """The numbers in a group's keys: (name, key, place in the key's tuple or -1, whether a flag, the first's)."""
    numbers: list[tuple[str, str, int, bool, float]] = []
    for key, value in groups[0].items():
        values = [group.get(key) for group in groups]
        several = isinstance(value, (tuple, list))
        if key in _NO_NUMBERS or not all(_is_like(other, value) for other in values):
            continue
        if several:
            stem = key.removesuffix("s")
            numbers += [(f"{stem}{place + 1}", key, place, False, float(one)) for place, one in enumerate(value)]
        else:
            numbers.append((key, key, -1, isinstance(value, bool), float(value)))
    return numbers


def _is_like(value: Any, first: Any) -> bool:
    """Whether it is a number, or are numbers, of the same kind as the first."""
    if isinstance(first, (tuple, list)):
        return isinstance(value, type(first)) and len(value) == len(first) > 0 and all(map(_is_number, value))
    return _is_number(value) and isinstance(value, bool) == isinstance(first, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _check_keys(
    groups: list[ParamGroup], info: OptimizerInfo, translated: Iterable[str] = (), extra_keys: bool = False
) -> None:
    known = {*keys_of(info), *_HARMLESS, *_CHANGES_THE_MATH, *translated}
    for number, group in enumerate(groups):
        for key in _CHANGES_THE_MATH:
            if group.get(key):
                raise ConfigError(f"optimizer group {number}: {key}={group[key]!r} is not supported yet; leave it out")
        for key in group:
            if key not in known and not extra_keys:
                raise ConfigError(
                    f"optimizer group {number}: unknown key {key!r}; {info.name} knows {', '.join(sorted(known))}"
                )


def _fits(value: Any, number: HyperparameterInfo) -> bool:
    above = math.isfinite(value) and (number.lowest is None or float(value) >= number.lowest)
    if number.highest is None:
        return above
    return above and (float(value) < number.highest if number.highest_excluded else float(value) <= number.highest)


def _range_text(numbers: list[HyperparameterInfo]) -> str:
    first = numbers[0]
    if first.highest is None:
        return "finite numbers" if first.lowest is None else f"a number of at least {first.lowest:g}"
    interval = f"[{first.lowest:g}, {first.highest:g}{')' if first.highest_excluded else ']'}"
    return f"both in {interval}" if len(numbers) == 2 else f"all in {interval}" if first.element >= 0 else interval


def _check_numbers(groups: list[ParamGroup], info: OptimizerInfo) -> None:
    for position, group in enumerate(groups):
        for key, numbers in _table_of(info).items():
            if group.get(key) is None:
                continue
            values = numbers_of(keys_of(info)[key], group[key])
            if not all(_fits(value, number) for value, number in zip(values, numbers, strict=True)):
                raise ConfigError(f"optimizer group {position}: {key}={group[key]!r}, expected {_range_text(numbers)}")


def check_group(given: ParamGroup, plan: OptimizerPlan) -> ParamGroup:
    """A group to be added: with a list of parameters in no other group, known keys and numbers in range."""
    group = _plain_groups([given])[0]
    _check_keys([group], plan.info, _TRANSLATED if plan.override else (), plan.extra_keys)
    _check_numbers([group], plan.info)
    held = {id(p) for other in plan.param_groups for p in other["params"]}
    if any(id(p) in held for p in group["params"]):
        raise ConfigError("add_param_group: a parameter of the new group is in another group already")
    return group


def name_groups(
    groups: list[ParamGroup], model_names: dict[int, str], others: Container[int] = ()
) -> list[tuple[int, list[str]]]:
    """[(group's index, names)] of the trainable parameters. Errors: a parameter not of the model, or given twice.

    others: indices of groups that other stages of a pipeline train: all stages have the same groups.
    """
    seen: dict[str, int] = {}
    named = []
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
        if names or number in others:
            named.append((number, names))
    if not named:
        raise ConfigError(
            "no trainable parameter is left to optimize: the model has none, or all given have requires_grad=False"
        )
    return named


def _info_of_instance(optimizer: torch.optim.Optimizer) -> OptimizerInfo | None:
    """The table's optimizer that computes the same: for one of torch's own classes, or one that names itself."""
    named = _C.find_optimizer(getattr(type(optimizer), "deeptide_type", ""))
    if named is not None:
        return named
    if any(group.get(key) for group in optimizer.param_groups for key in _CHANGES_THE_MATH):
        return None
    taken: dict[type, OptimizerInfo] = {}
    for info in _C.optimizers():
        taken.update({getattr(torch.optim, type): info for type in info.types if hasattr(torch.optim, type)})
    return taken.get(type(optimizer))


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Adagrad has its state from the start, at step 0."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _plan_of_instance(
    optimizer: torch.optim.Optimizer,
    model_names: dict[int, str],
    config: Config,
    extra_keys: bool,
    others: Container[int],
) -> OptimizerPlan:
    info = _info_of_instance(optimizer)
    if info is None:
        return _plan_of_own(optimizer, model_names, config, others)
    if _has_stepped(optimizer):
        raise ConfigError(
            "the optimizer has already stepped, and its moments would be lost; "
            "give a fresh one and load its state from a checkpoint"
        )
    groups = optimizer.param_groups
    _check_keys(groups, info, _TRANSLATED, extra_keys)
    _check_numbers(groups, info)
    for group in groups:
        if "decoupled_weight_decay" in keys_of(info):
            group.setdefault("decoupled_weight_decay", type(optimizer) is not torch.optim.Adam)
        if "match_rms_adamw" in keys_of(info):
            group.setdefault("match_rms_adamw", group.get("adjust_lr_fn") == "match_rms_adamw")
            group.setdefault("use_muon", True)
    named = name_groups(groups, model_names, others)
    return OptimizerPlan(
        info,
        groups,
        named,
        override=info.name,
        extra_keys=extra_keys,
        defaults=_known(optimizer.defaults, info),
        given=optimizer,
    )


def _known(defaults: dict[str, Any], info: OptimizerInfo) -> dict[str, Any]:
    return {key: value for key, value in defaults.items() if key in keys_of(info)}


def _plan_of_own(
    optimizer: torch.optim.Optimizer, model_names: dict[int, str], config: Config, others: Container[int]
) -> OptimizerPlan:
    """The plan for an optimizer that no kernel of ours replaces: it steps what the engine lends it."""
    from deeptide._optimizers.custom import PartStepper  # which needs this module
    from deeptide._optimizers.trial import kept_elsewhere, name_of, why_whole

    groups = optimizer.param_groups
    named = name_groups(groups, model_names, others)
    needs_whole = why_whole(optimizer)
    if needs_whole and config.zero.allow_untested_optimizer:
        say(
            f'optimizer {name_of(optimizer)} steps parts of parameters as "zero_allow_untested_optimizer" asks, though '
            f"{needs_whole}: it computes something else than with whole parameters",
            "warning",
        )
        needs_whole = ""
    if where := kept_elsewhere(optimizer):
        text = (
            f"optimizer {name_of(optimizer)} keeps what changes in each step in {where}, where neither checkpoints nor "
            "rewinds find it: a resumed run would be another one"
        )
        if not config.zero.allow_untested_optimizer:
            raise ConfigError(
                f'{text}. Keep it in self.state[parameter], or accept that: "zero_allow_untested_optimizer": true'
            )
        say(text, "warning")
    for place, group in enumerate(groups):
        if not _is_number(group.get("lr")):
            raise ConfigError(
                f"optimizer {name_of(optimizer)}: lr is {group.get('lr')!r} in group {place}, expected a finite number"
            )
    info = _C.kept_optimizer_info(name_of(optimizer), _numbers_in(groups))
    _check_numbers(groups, info)
    parameters = {model_names[id(p)]: p for group in groups for p in group["params"]}
    stepper = PartStepper(optimizer, info, needs_whole, [place for place, _ in named], parameters)
    return OptimizerPlan(info, groups, named, custom=stepper, given=optimizer)


def plan_optimizer(
    model: torch.nn.Module,
    model_names: dict[int, str],
    config: Config,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParametersSource | None = None,
    extra_keys: bool = False,
    others: Container[int] = (),
) -> OptimizerPlan | None:
    """The plan for what the caller gave; None when neither the caller nor the configuration names an optimizer.

    extra_keys: groups may hold keys of the program's own. others: as name_groups has them.
    """
    given = None if model_parameters is None else _plain_groups(model_parameters)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        trained = [p for p in model.parameters() if p.requires_grad]
        parameters: Any = given or trained or [{"params": []}]  # torch takes no empty list
        optimizer = optimizer(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _plan_of_instance(optimizer, model_names, config, extra_keys, others)
    if optimizer is not None:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer "
            "or a function that makes one from parameters"
        )
    info = config.optimizer.defaults.optimizer
    if info is None:
        return None
    groups: list[ParamGroup] = given or [{"params": [p for p in model.parameters() if p.requires_grad]}]
    _check_keys(groups, info, extra_keys=extra_keys)
    _check_numbers(groups, info)
    if "use_muon" in keys_of(info):
        from deeptide._optimizers.muon import muon_groups

        groups, others = muon_groups(groups, model, bool(config.optimizer.defaults["use_muon"]), others)
    named = name_groups(groups, model_names, others)
    plan = OptimizerPlan(info, groups, named, every=given is None, extra_keys=extra_keys)
    for group in groups:
        write_group(group, info, read_group(group, info, plan.defaults_of(group, config)))
    return plan
