# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Decides, of a model whose layers are to be cut, what sees a rank's positions and what sees all of them.

Within a block each module is one of these:

    region          has column-parallel layers, as attention and MLP: it takes all positions
    open            its row-parallel layers sum and give each rank its positions
    closed          everything inside is as without parts, and its output is cut: mixtures of experts, unknown modules
    by position     norms, linear layers: they take parts as they are, and the gradients of their weights add up
"""

from __future__ import annotations

import dataclasses

from torch import nn

from deeptide._C import ConfigError
from deeptide.pipeline.cutting.order import runs_before
from deeptide.tensor.cutting.adapters import is_adapters, layer_named
from deeptide.tensor.cutting.plans import ADDING, COLUMN, EXPERTS, ROW, VOCABULARY, Plan
from deeptide.tensor.cutting.slices import as_adding
from deeptide.tensor.layers import is_linear
from deeptide.tensor.leaving import join_outputs_around
from deeptide.tensor.positions import Positions, as_block, as_own_dropout, as_region
from deeptide.tensor.team import Team

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # of a configuration of Transformers


@dataclasses.dataclass
class Chain:
    """One container of blocks. All lists are of paths in the model."""

    path: str
    blocks: list[str]
    is_open: dict[str, bool] = dataclasses.field(default_factory=dict)  # by region
    rows: list[str] = dataclasses.field(default_factory=list)
    adding: list[str] = dataclasses.field(default_factory=list)
    dropouts: list[str] = dataclasses.field(default_factory=list)

    def apply(self, model: nn.Module, team: Team) -> None:
        """Changes the modules, whose layers are cut already."""
        positions = Positions(team, self.path)
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, is_open in self.is_open.items():
            as_region(modules[path], positions, not is_open)
        for path in self.rows:
            modules[path].tensor_positions = positions
        for path in (*self.rows, *self.adding):
            as_adding(modules[path], team)
        for path in self.dropouts:
            as_own_dropout(modules[path], team)
        for path in self.blocks:
            as_block(modules[path], positions, path == self.blocks[0], path == self.blocks[-1])
        join_outputs_around(model, self.path, positions)


def chains_of(model: nn.Module, plan: Plan) -> list[Chain]:
    """The chains of blocks between which positions can be cut. Errors: ConfigError if there are none, or by name."""
    _check(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    containers = dict.fromkeys(path for path in (container_of(cut, modules) for cut in plan) if path is not None)
    found = []
    for path in containers:
        blocks = [f"{path}.{name}" if path else name for name, _ in modules[path].named_children()]
        if any(block in plan for block in blocks):
            continue  # a chain of layers, and none of blocks
        chain = Chain(path, blocks)
        for block in blocks:
            _Walk(chain, plan, modules, block).descend(block)
        found.append(chain)
    if not found:
        raise ConfigError(
            f"parallel.sequence_parallel_norms: {type(model).__name__} has no ModuleList or Sequential of blocks "
            "with layers that are cut; leave the key out"
        )
    return found


def _check(model: nn.Module) -> None:
    for module in model.modules():
        if any(kind.__name__ == "RandomLayerTokenDrop" for kind in type(module).__mro__):
            raise ConfigError(
                "parallel.sequence_parallel_norms does not go with random-LTD, which drops positions of whole "
                "sequences; leave one of them out"
            )
    config = getattr(model, "config", None)
    for key in _DROPS:
        if getattr(config, key, 0.0):
            raise ConfigError(
                f"parallel.sequence_parallel_norms: the model's {key} is {getattr(config, key)}, so a block that "
                f"cuts or joins positions may be left out; set {key} to 0, or leave the key out"
            )


def container_of(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The outermost container around a layer whose children are numbered."""
    words = path.split(".")
    for at, word in enumerate(words):
        container = ".".join(words[:at])
        if word.isdigit() and isinstance(modules.get(container), nn.ModuleList | nn.Sequential):
            return container
    return None


class _Walk:
    """Goes through one block, and writes what it finds into its chain."""

    def __init__(self, chain: Chain, plan: Plan, modules: dict[str, nn.Module], block: str) -> None:
        self._chain, self._modules, self._block = chain, modules, block
        self._plan = {path: cut for path, cut in plan.items() if path.startswith(f"{block}.")}

    def descend(self, path: str) -> None:
        """A module that sees parts, and has no forward of a kind that needs all positions."""
        if self._modules[path]._parameters:
            self._chain.adding.append(path)
        for name, child in self._modules[path].named_children():
            self._visit(f"{path}.{name}", child)

    def _visit(self, path: str, child: nn.Module) -> None:
        cut = self._plan.get(path)
        inside = self._cuts_in(path)
        if cut is not None and cut.kind == EXPERTS:
            raise ConfigError(
                f"parallel.sequence_parallel_norms: '{self._block}' calls its experts '{path}' by itself, which "
                "take all positions; expected a module around them that also chooses. Leave the key out"
            )
        if cut is not None:
            self._layer(path)
        elif any(self._plan[layer].kind == EXPERTS for layer in inside):
            self._chain.is_open[path] = False
        elif self._columns_of(path):
            self._region(path)
        elif isinstance(child, nn.ModuleList | nn.ModuleDict) or (inside and not self._has_unknown(path)):
            self.descend(path)
        elif not _has_parameters(child):
            self._chain.dropouts += [inner for inner, _ in child.named_modules(prefix=path)]
        elif _is_by_position(child):
            self._chain.adding.append(path)
        else:
            self._chain.is_open[path] = False

    def _has_unknown(self, path: str) -> bool:
        """Whether a child may need all positions, such as the router of experts that stay whole."""
        return any(
            not _is_by_position(child) and not self._cuts_in(f"{path}.{name}", itself=True) and _has_parameters(child)
            for name, child in self._modules[path].named_children()
            if not isinstance(child, nn.ModuleList | nn.ModuleDict)
        )

    def _layer(self, path: str) -> None:
        """A layer that is cut, and that no region has around it."""
        cut = self._plan[path]
        if cut.kind == ROW and not cut.meets_whole:
            self._chain.rows.append(path)
        elif cut.kind not in (ADDING, VOCABULARY):
            self._chain.is_open[path] = cut.kind == COLUMN and not cut.meets_whole

    def _region(self, path: str) -> None:
        is_open = self._may_open(path)
        self._chain.is_open[path] = is_open
        if not is_open:
            return
        for name, child in self._modules[path].named_children():
            inner = f"{path}.{name}"
            kinds = {self._plan[layer].kind for layer in self._cuts_in(inner, itself=True)}
            if kinds == {ROW}:
                self._visit(inner, child)
            elif not kinds:
                self._chain.dropouts.append(inner)

    def _may_open(self, path: str) -> bool:
        """Whether row-parallel layers come last there: after them, nothing that is whole sees a part of positions."""
        parent = self._modules[path]
        if any(self._plan[layer].meets_whole for layer in self._cuts_in(path)):
            return False
        cuts = {name: self._cuts_in(f"{path}.{name}", itself=True) for name, _ in parent.named_children()}
        if any(self._columns_of(f"{path}.{name}") and not self._is_adapted(f"{path}.{name}") for name in cuts):
            return False  # a region within a region
        rows = [name for name, layers in cuts.items() if any(self._plan[layer].kind == ROW for layer in layers)]
        whole = [name for name, layers in cuts.items() if not layers and _has_parameters(getattr(parent, name))]
        return all(runs_before(parent, name, row) for name in whole for row in rows)

    def _is_adapted(self, path: str) -> bool:
        return "base_layer" in self._modules[path]._modules

    def _columns_of(self, path: str) -> list[str]:
        """Layers that a module has itself, some of whose features each rank computes."""
        return [
            layer
            for layer in self._cuts_in(path)
            if self._plan[layer].kind == COLUMN
            and not is_adapters(layer)
            and path in (layer.rpartition(".")[0], layer_named(layer).rpartition(".")[0])
        ]

    def _cuts_in(self, path: str, itself: bool = False) -> list[str]:
        return [layer for layer in self._plan if layer.startswith(f"{path}.") or (itself and layer == path)]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_by_position(module: nn.Module) -> bool:
    """Whether each position's output is of that position alone: a norm, a scale or a linear layer."""
    if any(True for _ in module.children()):
        return False
    return isinstance(module, nn.Linear) or is_linear(module) or all(p.dim() <= 1 for p in module.parameters())
