# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of linear layers by what flows between them, for models whose layers have names of their own.

One run follows values from each linear layer to the layers that take them. Layers whose outputs reach one later layer
and nothing else are columns, and that one is a row. Then the smallest module around a pair runs alone, cut in one way
after another, with the inputs that it had: the first way that computes the same is taken.

    columns and rows    each rank has its features in between: MLPs, and attention whose module knows its heads
    by thirds           the same, with fused queries, keys and values
    gathered            ranks share the weights, and join the features in between: right for any module
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from deeptide._C import CommError
from deeptide.tensor.cutting.between import common_path, per_feature
from deeptide.tensor.cutting.examples import Example
from deeptide.tensor.cutting.plans import COLUMN, ROW, Cut, Plan
from deeptide.tensor.cutting.rule import adapt_sizes
from deeptide.tensor.layers import as_column, as_row, features_of, is_linear
from deeptide.tensor.team import Team


@dataclasses.dataclass(frozen=True)
class Pair:
    """Paths of layers. `around`: the smallest module that has them all."""

    columns: tuple[str, ...]
    row: str
    around: str

    @property
    def is_in_a_block(self) -> bool:
        """Whether the layers are numbered ones, or within such. Others may be a head's, beside the blocks."""
        return any(word.isdigit() for word in self.row.split("."))


class _Sources(TorchDispatchMode):
    """Notes of each tensor the linear layers and parameters that it comes from, up to the last linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of = WeakTensorKeyDictionary()
        for name, parameter in model.named_parameters():
            self.of[parameter] = frozenset((name,))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = self.among((args, kwargs))
        if sources:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                    self.of[tensor] = self.of.get(tensor, frozenset()) | sources
        return result

    def among(self, values: Any) -> frozenset[str]:
        """The sources of all tensors in nested values."""
        found = [self.of.get(each) for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
        return frozenset[str]().union(*(sources for sources in found if sources))


def _traced(model: nn.Module, inputs: Example) -> dict[str, frozenset[str]]:
    """By the path of each linear layer, in the order of calls, the sources of what it takes; "" has the outputs'."""
    taken: dict[str, frozenset[str]] = {}
    sources = _Sources(model)
    layers = {path: module for path, module in model.named_modules() if is_linear(module)}

    def before(path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            taken[path] = taken.get(path, frozenset()) | sources.among((args, kwargs))

        return hook

    def after(path: str) -> Any:
        def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            sources.of[output] = frozenset((path,))

        return hook

    hooks = [module.register_forward_pre_hook(before(path), with_kwargs=True) for path, module in layers.items()]
    hooks += [module.register_forward_hook(after(path)) for path, module in layers.items()]
    try:
        with sources, torch.no_grad():
            taken[""] = sources.among(_plain(model(**inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    return taken


def _plain(output: Any) -> Any:
    return list(output.values()) if isinstance(output, dict) else output


def pairs_of(model: nn.Module, inputs: Example) -> list[Pair]:
    """The pairs of a model, in the order of its calls. No layer is in two of them."""
    taken = _traced(model, inputs)
    modules = dict(model.named_modules())
    pairs: list[Pair] = []
    used: set[str] = set()
    for row, sources in taken.items():
        columns = [path for path in taken if path in sources and path]
        if not row or not columns or used & {row, *columns}:
            continue
        around = common_path([row, *columns])
        beside = [source for source in sources if source not in columns]
        if any(column in other for column in columns for path, other in taken.items() if path != row):
            continue  # something else takes it too
        if all(source.startswith(f"{around}." if around else "") for source in beside) and around in modules:
            pairs.append(Pair(tuple(columns), row, around))
            used |= {row, *columns}
    return pairs


def fits(plan: Plan, pairs: list[Pair]) -> bool:
    """Whether a plan by names cuts each pair whole, or not at all."""
    for pair in pairs:
        kinds = {path: plan[path].kind if path in plan else None for path in (*pair.columns, pair.row)}
        columns = {kinds[path] for path in pair.columns}
        if (columns, kinds[pair.row]) not in (({COLUMN}, ROW), ({None}, None)):
            return False
    return True


def with_values_per_feature(model: nn.Module, plan: Plan, pairs: list[Pair]) -> list[Pair]:
    """Those between whose layers a parameter or buffer has a value for each of the features."""
    columns = {found.column for found in per_feature(model, plan)}
    return [pair for pair in pairs if columns & {*pair.columns}]


def plan_of_pairs(model: nn.Module, pairs: list[Pair], inputs: Example, team: Team) -> Plan:
    """The first way to cut each pair that computes the same. Collective. Pairs of equal modules are tried once."""
    modules = dict(model.named_modules())
    seen = _calls(model, {pair.around for pair in pairs}, inputs)
    chosen: dict[Any, int] = {}
    plan: Plan = {}
    for pair in pairs:
        ways = list(_ways(pair, modules, team.size))
        key = _signature(pair, modules)
        if key not in chosen:
            alone = (number for number, way in enumerate(ways) if _computes_the_same(seen, pair, way, modules, team))
            chosen[key] = next(alone, len(ways))
        if chosen[key] < len(ways):
            plan |= ways[chosen[key]]
    return plan


def _signature(pair: Pair, modules: dict[str, nn.Module]) -> Any:
    around = modules[pair.around]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in around.named_parameters()]
    return type(around), tuple(shapes), tuple(path[len(pair.around) :] for path in (*pair.columns, pair.row))


def _ways(pair: Pair, modules: dict[str, nn.Module], size: int) -> Iterator[Plan]:
    outputs = [features_of(modules[path])[1] for path in pair.columns]
    inputs = features_of(modules[pair.row])[0]
    if inputs % size == 0 and all(features % size == 0 for features in outputs):
        yield {**dict.fromkeys(pair.columns, Cut(COLUMN)), pair.row: Cut(ROW)}
    if len(outputs) == 1 and outputs[0] % (3 * size) == 0 and inputs % size == 0:
        third = outputs[0] // 3
        yield {pair.columns[0]: Cut(COLUMN, blocks=(third,) * 3), pair.row: Cut(ROW)}
    yield {**dict.fromkeys(pair.columns, Cut(COLUMN, True)), pair.row: Cut(ROW, True)}


def _own(values: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, values)


def _calls(model: nn.Module, paths: set[str], inputs: Example) -> dict[str, tuple[Any, Any, Any]]:
    """{path: (arguments, keywords, output) of its first call}."""
    modules = dict(model.named_modules())
    given: dict[str, Any] = {}
    seen: dict[str, tuple[Any, Any, Any]] = {}

    def before(path: str) -> Any:
        return lambda _, args, kwargs: given.setdefault(path, (_own(args), _own(kwargs))) and None

    def after(path: str) -> Any:
        return lambda _, args, output: seen.setdefault(path, (*given[path], _own(_plain(output)))) and None

    hooks = [modules[path].register_forward_pre_hook(before(path), with_kwargs=True) for path in paths]
    hooks += [modules[path].register_forward_hook(after(path)) for path in paths]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _computes_the_same(
    seen: dict[str, tuple[Any, Any, Any]], pair: Pair, way: Plan, modules: dict[str, nn.Module], team: Team
) -> bool:
    """Whether a copy of the module, cut so, gives each rank the outputs that the whole one gave. Collective."""
    if pair.around not in seen:
        return False
    args, kwargs, before = seen[pair.around]
    begin = len(pair.around) + 1 if pair.around else 0
    own = {path[begin:]: cut for path, cut in way.items()}
    try:
        module = copy.deepcopy(modules[pair.around])
        for path, cut in own.items():
            make = as_column if cut.kind == COLUMN else as_row
            make(module.get_submodule(path), team, cut.meets_whole, cut.blocks)
        adapt_sizes(module, own, team.size)
        with torch.no_grad():
            after = _plain(module(*_own(args), **_own(kwargs)))
    except Exception as error:  # the module raises what it likes
        if isinstance(error, CommError):
            raise
        return not team.any(True)
    return not team.any(not _alike(before, after))


def _alike(before: Any, after: Any) -> bool:
    pairs = list(zip(tree_leaves(before), tree_leaves(after)))
    for one, other in pairs:
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            if not isinstance(other, torch.Tensor) or one.shape != other.shape:
                return False
            most = 64 * torch.finfo(one.dtype).eps * max(one.abs().max().item() if one.numel() else 0.0, 1e-3)
            if one.numel() and not (one - other).abs().max().item() <= most:
                return False
    return True
