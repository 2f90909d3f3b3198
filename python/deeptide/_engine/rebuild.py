# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Takes a model whose parameters have changed, and groups that were added, into a running engine."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._model import changes
from deeptide._model.buffers import looks_at
from deeptide._model.describe import describe, parameter_names
from deeptide._optimizers.groups import (
    OptimizerPlan,
    ParamGroup,
    check_group,
    keys_of,
    name_groups,
    read_group,
    write_group,
)
from deeptide._optimizers.muon import choice_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeptide.engine import Engine


def rebuild(engine: Engine) -> None:
    """Rebuilds the engine's core over the model as it is now; the optimizer follows. Collective."""
    model = engine.module
    optimizer = engine.optimizer if isinstance(engine.optimizer, torch.optim.Optimizer) else None
    plan: OptimizerPlan | None = None if optimizer is None else optimizer.plan
    seen = changes.count()
    with _as_before_if_refused(plan):
        if plan is not None:
            plan = _regrouped(plan, model, engine._config)
        groups = [] if plan is None else plan.core_groups(engine._config)
        optimizer_type = "" if plan is None else plan.override
        options = _C.InitOptions(engine.world, groups, optimizer_type, *looks_at(model))
        engine._core.rebuild(describe(model), options)
    engine._registrations = seen
    if optimizer is not None and plan is not None:
        optimizer.follow(plan, engine._core)
    if engine._activations is not None:
        engine._activations.follow()


@contextlib.contextmanager
def _as_before_if_refused(plan: OptimizerPlan | None) -> Iterator[None]:
    """Gives the groups and their parameters back as they were if what runs inside raises."""
    if plan is None:
        yield
        return
    groups, starts = plan.param_groups, dict(plan.starts)
    before = [(group, group["params"]) for group in groups]
    try:
        yield
    except BaseException:
        plan.starts.clear()
        plan.starts.update(starts)
        for group, parameters in before:
            group["params"] = parameters
        groups[:] = [group for group, _ in before]
        raise


def group_to_add(plan: OptimizerPlan, given: ParamGroup, model: torch.nn.Module, config: _C.Config) -> ParamGroup:
    """`given` as one of the optimizer's groups, whole. Errors: ConfigError as for groups given to initialize."""
    if plan.custom is not None:
        raise ConfigError(
            "add_param_group: an optimizer of the program's own keeps its states itself, so groups cannot be added to "
            "a running engine; give them all to initialize"
        )
    group = {**plan.defaults, **check_group(given, plan)}
    names = parameter_names(model)
    foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
    if foreign:
        raise ConfigError(
            f"add_param_group: a parameter of shape {foreign[0]} is not one of the model's; put it into the model first"
        )
    if "use_muon" in keys_of(plan.info) and "use_muon" not in group:
        takes = choice_of(model, bool(config.optimizer.defaults["use_muon"]))
        if len(flags := {takes(p) for p in group["params"]}) > 1:
            raise ConfigError(
                "add_param_group: the group holds matrices, which Muon orthogonalizes, and other parameters, which "
                "AdamW steps; add them as two groups, or say use_muon"
            )
        group["use_muon"] = flags.pop() if flags else True
    _complete(group, plan, config)
    return group


def _complete(group: ParamGroup, plan: OptimizerPlan, config: _C.Config) -> None:
    """Gives a group the configuration's values for the keys that it lacks."""
    write_group(group, plan.info, read_group(group, plan.info, plan.defaults_of(group, config)))


def _regrouped(plan: OptimizerPlan, model: torch.nn.Module, config: _C.Config) -> OptimizerPlan:
    """The plan for the model as it is now: its groups without what the model no longer has, and with what is new."""
    names = parameter_names(model)
    members = [[p for p in group["params"] if id(p) in names] for group in plan.param_groups]
    groups: list[ParamGroup] = [{**group, "params": own} for group, own in zip(plan.param_groups, members, strict=True)]
    placed = {id(p) for own in members for p in own} | {id(p) for p in plan.left_out}
    new = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in placed]
    if new and not plan.every:
        raise ConfigError(
            f"rebuild: parameter '{new[0][0]}' requires a gradient and is in no group of the optimizer"
            + (f", as are {len(new) - 1} others" if len(new) > 1 else "")
            + ". Add it: optimizer.add_param_group({'params': [...]}), which rebuilds the engine as well"
        )
    kept = list(plan.param_groups)
    for _, parameter in new:
        place = _group_for(parameter, groups, plan, model, config)
        if place == len(kept):
            kept.append(groups[place])
        groups[place]["params"].append(parameter)
    named = name_groups(groups, names)
    for group, now in zip(kept, groups, strict=True):
        group["params"] = now["params"]
    return replace(plan, param_groups=_in_place(plan.param_groups, kept), names=named)


def _in_place(live: list[ParamGroup], now: list[ParamGroup]) -> list[ParamGroup]:
    """The same list object, which schedulers hold."""
    live[:] = now
    return live


def _group_for(
    parameter: torch.Tensor, groups: list[ParamGroup], plan: OptimizerPlan, model: torch.nn.Module, config: Any
) -> int:
    """The group of a new parameter, among groups that were made for all parameters; Muon has two kinds."""
    if "use_muon" not in keys_of(plan.info):
        return 0
    muon = choice_of(model, bool(config.optimizer.defaults["use_muon"]))(parameter)
    for place, group in enumerate(groups):
        if bool(group["use_muon"]) == muon:
            return place
    group = {"params": [], "use_muon": muon}
    _complete(group, plan, config)
    groups.append(group)
    return len(groups) - 1
