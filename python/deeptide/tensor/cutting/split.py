# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a model, as it is, among the ranks of a team."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._process.log import say
from deeptide.tensor.cutting import check as checks
from deeptide.tensor.cutting.adapters import has_adapters, is_adapters, layer_named, with_adapters
from deeptide.tensor.cutting.between import per_feature
from deeptide.tensor.cutting.flow import fits, pairs_of, plan_of_pairs, with_values_per_feature
from deeptide.tensor.cutting.plans import (
    ADDING,
    COLUMN,
    EXPERTS,
    HEADS,
    LATENT,
    ROW,
    VOCABULARY,
    Plan,
    experts_of,
    model_within,
    own_plan,
    plan_of_specs,
)
from deeptide.tensor.cutting.regions import chains_of, container_of
from deeptide.tensor.cutting.rule import adapt_sizes, rule_plan, words_and_heads
from deeptide.tensor.cutting.slices import Slice, as_adding
from deeptide.tensor.experts import as_sliced_experts, divides, slices_of_experts
from deeptide.tensor.layers import (
    as_column,
    as_heads,
    as_latent,
    as_own_heads,
    as_row,
    as_vocabulary,
    features_of,
    heads_table,
    is_linear,
    slices_of_heads,
    slices_of_layer,
)
from deeptide.tensor.leaving import join_outputs_around
from deeptide.tensor.losses import CausalLoss
from deeptide.tensor.positions import as_attention
from deeptide.tensor.team import Team, team_of

_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head")


def split_model(
    model: nn.Module,
    team: Team,
    layer_specs: Sequence[Any] = (),
    use_rule: bool = True,
    check: bool = True,
    example: dict[str, Any] | None = None,
    sequence_parallel_norms: bool = False,
) -> nn.Module:
    """Leaves this rank's slices in the model, whose parameters stay the same objects; returns it. Collective.

    What is cut: the model's own plan (Transformers' _tp_plan), else attention and MLP by names; layer_specs, as
    DeepSpeed's tensor_parallel.partition_config has them, change it, or are all there is with use_rule=False. The first
    rank's values count. check: compares outputs and gradients of a small run with the whole model's: of `example`,
    keyword arguments, or of a few words, a picture or a sound for Transformers' models. sequence_parallel_norms:
    between attention and MLP each rank has a part of the positions. Errors: ConfigError, before anything is changed but
    where the check fails; also where layers are found by names, and no inputs are known to check that with.
    """
    if team_of(model) is not None:
        raise ConfigError("split_model: layers of the model are cut already")
    check = not _share_values(model, team) and check
    checked = checks.Checked(model, example, team) if check else None
    with checked.weights_come_back() if checked else nullcontext():
        plan, is_own = _plan_by_names_or_flow(model, layer_specs, use_rule, checked, team)
        if is_own:
            plan = _without_odd_experts(model, plan, team)
            _tell_of_whole_blocks(model, plan, team)
        check_plan(model, plan, team.size)
        if checked and checked.whole is None and not (is_own or layer_specs):
            checks.refuse_unchecked(model)
        between = None if is_own else next(per_feature(model, plan), None)
        if between is not None and (checked is None or checked.whole is None):
            raise ConfigError(
                f"{between}: leave '{between.column}' and the layers around it whole by \"skip\" in "
                "tensor_parallel.partition_config, or let the start's check run, which finds a cut that joins the "
                "features in between: build the model without zero.Init, leave parallel.tensor_check out, and give "
                "split_model an example"
            )
        chains = chains_of(model, plan) if sequence_parallel_norms and team.size > 1 else []
        if checked:
            checked.take_gradients(slices_of_plan(model, plan))
        if checked is None or checked.whole is None or checked.whole.gradients is None:
            _check_norms_of_heads(model, plan)
        _apply(model, plan, team)
        if not is_own:
            adapt_sizes(model, plan, team.size)
        for chain in chains:
            chain.apply(model, team)
        if checked and checked.whole is not None:
            checks.compare(model, checked.whole, team, str(between or ""))
    if checked and checked.whole is None and team.index == team.data_rank == 0:
        checks.tell_unchecked(model)
    return model


def _plan_by_names_or_flow(
    model: nn.Module, specs: Sequence[Any], use_rule: bool, checked: checks.Checked | None, team: Team
) -> tuple[Plan, bool]:
    """plan_for(), or, where names do not tell, a plan of pairs between whose layers values flow. Collective.

    Errors: ConfigError for a plan that is given, by the model or the configuration, and does not fit.
    """
    is_given = not use_rule or bool(specs) or bool(own_plan(model)) or has_adapters(model)
    if is_given or checked is None or checked.whole is None:
        return plan_for(model, specs, use_rule)
    plan: Plan = {}
    error: ConfigError | None = None
    try:
        plan, _ = plan_for(model, specs, use_rule)
    except ConfigError as refusal:
        error = refusal
    inputs, beside = checked.whole.inputs, words_and_heads(model)
    with checked.evaluated():
        pairs = [pair for pair in pairs_of(model, inputs) if not beside.keys() & {pair.row, *pair.columns}]
        pairs = [pair for pair in pairs if pair.is_in_a_block] or pairs
        if error is None and fits(plan, pairs):
            return plan | plan_of_pairs(model, with_values_per_feature(model, plan, pairs), inputs, team), False
        found = plan_of_pairs(model, pairs, inputs, team)
    if not found and error is not None:
        raise error
    return (_with_ties(model, {**beside, **found}), False) if found else (plan, False)


def slices_of_plan(model: nn.Module, plan: Plan) -> dict[int, Slice]:
    """{id of a parameter: how it will be cut}."""
    modules = dict(model.named_modules())
    found: dict[int, Slice] = {}
    for path, cut in plan.items():
        module = modules[path]
        if cut.kind == EXPERTS:
            slices = slices_of_experts(module)
        elif cut.kind == HEADS:
            slices = slices_of_heads(path, module)
        else:
            slices = slices_of_layer(module, cut.kind, cut.blocks)
        for name, slice_ in slices.items():
            parameter = getattr(module, name, None)
            if parameter is not None:
                found[id(parameter)] = slice_
    return found


def _tell_of_whole_blocks(model: nn.Module, plan: Plan, team: Team) -> None:
    """A plan of the head alone, as GptOss has, leaves most of the model whole."""
    if (
        plan
        and not any(word.isdigit() for path in plan for word in path.split("."))
        and team.index == team.data_rank == 0
    ):
        say(
            f"tensor: {type(model).__name__}'s own tensor-parallel plan cuts {', '.join(map(repr, plan))} alone; its "
            "blocks stay whole on each rank. tensor_parallel.partition_config.layer_specs names more"
        )


def _without_odd_experts(model: nn.Module, plan: Plan, team: Team) -> Plan:
    """Experts that are not cut are told of."""
    modules = dict(model.named_modules())
    odd = {path for path, cut in plan.items() if cut.kind == EXPERTS and not divides(modules[path], team.size)}
    whole = [path for path in experts_of(model) if path in odd or path not in plan]
    if whole and team.index == team.data_rank == 0:
        by_eights = f"its inner features do not divide among {team.size} ranks by eights"
        why = by_eights if odd else "its weights have another form"
        say(f"tensor: '{whole[0]}' and others stay whole, since {why}; ZeRO shards them over the stage's ranks")
    return {path: cut for path, cut in plan.items() if path not in odd}


def _share_values(model: nn.Module, team: Team) -> bool:
    """Gives all ranks the first one's values. Returns whether some are deferred, which the engine makes and shares."""
    tensors = [*model.parameters(), *model.buffers()]
    ready = [tensor for tensor in tensors if not _C.is_deferred(tensor)]
    for tensor in ready:
        team.core.broadcast(tensor.detach(), "start")
    return len(ready) < len(tensors)


def plan_for(model: nn.Module, layer_specs: Sequence[Any] = (), use_rule: bool = True) -> tuple[Plan, bool]:
    """(what is cut, whether it is the model's own plan). Errors: ConfigError if there is none."""
    own = own_plan(model) if use_rule else {}
    begin = own or (rule_plan(model) if use_rule and not layer_specs else {})
    plan = with_adapters(model, plan_of_specs(model, layer_specs, begin))
    if not plan:
        raise ConfigError("tensor_parallel.partition_config names no layer to cut; add layer_specs")
    return _with_ties(model, plan), bool(own)


def _with_ties(model: nn.Module, plan: Plan) -> Plan:
    """An embedding and a head that share their weight are cut together. Errors: ConfigError for other ties."""
    plan = dict(plan)
    modules = dict(model.named_modules())
    users: dict[int, list[str]] = {}
    for path, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(path)
    for paths in users.values():
        cut = [path for path in paths if path in plan and plan[path].kind != ADDING]
        paths = [path for path in paths if not any(inner.startswith(f"{path}.") for inner in cut)]  # its owner's name
        if not cut or len(paths) == len(cut):
            continue
        for path in set(paths) - set(cut):
            module = modules[path]
            if isinstance(module, nn.Embedding) and plan[cut[0]].kind in (COLUMN, VOCABULARY):
                plan[path] = type(plan[cut[0]])(VOCABULARY)
            elif is_linear(module) and plan[cut[0]].kind == VOCABULARY:
                plan[path] = type(plan[cut[0]])(COLUMN, True)
            else:
                raise ConfigError(
                    f"'{cut[0]}' is cut, and its weight is also that of '{path}', a {type(module).__name__}, which is "
                    'not; leave the former whole by "skip" in tensor_parallel.partition_config'
                )
    return plan


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _numbers_of_heads(model: nn.Module) -> set[int]:
    found = [getattr(_text_config(model), name, None) for name in _HEADS]
    return {number for number in found if isinstance(number, int)}


def check_plan(model: nn.Module, plan: Plan, size: int) -> None:
    """Everything that can be known before a parameter changes."""
    config = _text_config(model)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"the model's {name} is {heads}, which does not divide among {size} ranks; take parallel.tensor that "
                f"divides it: {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
            )
    modules = dict(model.named_modules())
    for path, cut in plan.items():
        module = modules[path]
        table = heads_table(path, module) if cut.kind == HEADS else None
        if table is not None and (heads := module.get_parameter(table).shape[-1]) % size:
            raise ConfigError(
                f"'{path}' has a number for each of {heads} heads, which do not divide among {size} "
                "ranks; take parallel.tensor that divides them"
            )
        if cut.kind in (COLUMN, ROW) and not is_linear(module):
            raise ConfigError(f"'{path}' is to be cut, and is a {type(module).__name__}; expected a linear layer")
        if cut.kind in (COLUMN, ROW) and not cut.meets_whole:
            features = features_of(module)[1 if cut.kind == COLUMN else 0]
            for block in cut.blocks or (features,):
                if block % size:
                    raise ConfigError(
                        f"'{path}' has {block} {'outputs' if cut.kind == COLUMN else 'inputs'}, which do not divide "
                        f'among {size} ranks; choose another parallel.tensor, or leave it whole by "skip" in '
                        "tensor_parallel.partition_config"
                    )


def _apply(model: nn.Module, plan: Plan, team: Team) -> None:
    modules = dict(model.named_modules())
    for path, cut in plan.items():
        module = modules[path]
        if cut.kind == COLUMN:
            as_column(module, team, cut.meets_whole, cut.blocks)
        elif cut.kind == ROW:
            as_row(module, team, cut.meets_whole, cut.blocks)
        elif cut.kind == EXPERTS:
            as_sliced_experts(module, team)
        elif cut.kind == LATENT:
            as_latent(module, team, cut.blocks)
        elif cut.kind == HEADS:
            as_heads(path, module, team)
        elif cut.kind == VOCABULARY:
            assert isinstance(module, nn.Embedding)
            as_vocabulary(module, team)
        else:
            as_adding(module, team)
    _join_heads(model, plan, team)
    _compute_loss_in_parts(model, plan, team)


def _owners_of_columns(plan: Plan) -> list[str]:
    """The modules that have layers of some of whose features each rank computes, in the plan's order."""
    columns = [path for path, cut in plan.items() if cut.kind == COLUMN and not cut.meets_whole]
    return list(dict.fromkeys(layer_named(path).rpartition(".")[0] for path in columns if not is_adapters(path)))


def _check_norms_of_heads(model: nn.Module, plan: Plan) -> None:
    """Runs if gradients are not compared. Errors: ConfigError for a norm over a head's features that nothing sums."""
    modules = dict(model.named_modules())
    for owner in _owners_of_columns(plan):
        features = getattr(modules[owner], "head_dim", None)
        if any(plan[path].kind == LATENT for path in plan if path.startswith(f"{owner}.")):
            continue  # its norms are over latents, which all ranks have
        for path, module in modules[owner].named_modules(prefix=owner):
            for name, parameter in module._parameters.items():
                is_norm = parameter is not None and parameter.dim() == 1 and not is_linear(module)
                if is_norm and path not in plan and parameter.numel() == features:
                    raise ConfigError(
                        f"'{path}.{name}' is a norm over a head's features, so each rank would have a part of its "
                        "gradient, and the start's check, which would find that the parts add up, does not run: build "
                        "the model without zero.Init, leave parallel.tensor_check out, give split_model an example, or "
                        f"add '{path}': 'replicated_with_grad_allreduce' to the model's _tp_plan"
                    )


def _join_heads(model: nn.Module, plan: Plan, team: Team) -> None:
    """Attention's weights are of each rank's heads, and leave the model whole if the program asks for them."""
    modules = dict(model.named_modules())
    owners = _owners_of_columns(plan)
    for path in owners:
        if "Attention" in type(modules[path]).__name__:
            as_attention(modules[path], team)
            as_own_heads(modules[path], _numbers_of_heads(model), team)
            container = container_of(path, modules)
            join_outputs_around(model, path if container is None else container)


def _compute_loss_in_parts(model: Any, plan: Plan, team: Team) -> None:
    """A causal model of Transformers computes its loss from its head's own logits, where they are gathered."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    cuts = [plan[path] for path, module in model.named_modules() if module is head and path in plan]
    _, model = model_within(model)
    gathers = any(cut.kind == COLUMN and cut.meets_whole and not cut.blocks for cut in cuts)
    if gathers and CausalLoss.stands_in_for(getattr(model, "loss_function", None)):
        head.tensor_is_head = True
        model.loss_function = CausalLoss(model.loss_function, team)


__all__ = ["check_plan", "plan_for", "slices_of_plan", "split_model"]
