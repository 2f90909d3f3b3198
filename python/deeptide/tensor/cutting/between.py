# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Values for each feature between layers that divide the features and those that join them, such as PReLU's weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from deeptide.tensor.cutting.adapters import is_adapters
from deeptide.tensor.cutting.plans import COLUMN, ROW, Plan
from deeptide.tensor.layers import features_of, is_linear


class PerFeature(NamedTuple):
    """A parameter or buffer. `column`: the path of the layer that has a part of the features on each rank."""

    name: str
    features: int
    column: str

    def __str__(self) -> str:
        return (
            f"'{self.name}' has a value for each of the {self.features} features of '{self.column}', of which each "
            "rank would have a part"
        )


def per_feature(model: nn.Module, plan: Plan) -> Iterator[PerFeature]:
    """Looks at what is registered between the layers of a pair, and at what else is around them."""
    modules = dict(model.named_modules())
    cuts = {path: plan[path].kind for path in modules if path in plan and not plan[path].meets_whole}
    outside = {features_of(modules[path])[0 if kind == COLUMN else 1] for path, kind in cuts.items() if kind in _PAIR}
    columns: list[str] = []
    between: list[str] = []
    for path in modules:
        kind = cuts.get(path)
        if kind == COLUMN:
            columns.append(path)
        elif kind == ROW and columns:
            features = features_of(modules[path])[0]
            yield from _of_modules(modules, between, plan, features, columns[0])
            if features not in outside:  # else a norm before the layers has as many
                around = common_path([*columns, path])
                inside = [each for each in modules if each == around or each.startswith(f"{around}." if around else "")]
                yield from _of_modules(modules, inside, plan, features, columns[0])
            columns, between = [], []
        elif columns:
            between.append(path)


_PAIR = (COLUMN, ROW)


def common_path(paths: list[str]) -> str:
    """The path of the smallest module that has them all."""
    shared = []
    for words in zip(*(path.split(".")[:-1] for path in paths)):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _of_modules(
    modules: dict[str, nn.Module], paths: list[str], plan: Plan, features: int, column: str
) -> Iterator[PerFeature]:
    for path in paths:
        if path in plan or is_adapters(path) or is_linear(modules[path]):
            continue
        for name, value in (*modules[path]._parameters.items(), *modules[path]._buffers.items()):
            if value is not None and value.is_floating_point() and value.numel() == features:
                yield PerFeature(f"{path}.{name}" if path else name, features, column)
