# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The section "compression_training": which modules, which technique, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide.compression.layers import can_take

SECTION = "compression_training"
OLDER = "quantize_training"


@dataclasses.dataclass(frozen=True)
class Group:
    """One of a technique's "different_groups"; `params` holds the shared parameters too, `path` is for errors."""

    technique: str
    name: str
    path: str
    params: dict[str, Any]
    modules: list[str]
    related: list[list[str]]


def read_section(config: Config) -> dict[str, Any]:
    """The section with its defaults; "quantize_training" becomes a group of it. Errors: ConfigError for both."""
    section: dict[str, Any] = json.loads(_C.compression_section(config))
    return section


def read_older(config: Config) -> dict[str, Any]:
    """The section "quantize_training" with its defaults."""
    section: dict[str, Any] = json.loads(_C.config_section(config, OLDER))
    return section


def groups_of(config: Config) -> list[Group]:
    """Those of all techniques that are on, in the order in which they are made final. Errors: ConfigError."""
    return [Group(**group) for group in json.loads(_C.compression_groups(config))]


def matching(model: nn.Module, group: Group, pattern: str, key: str = "modules") -> list[str]:
    """Names in which the regular expression is found, of modules that `group` can change; "*" is all of them.

    Errors: ConfigError where there is none.
    """
    try:
        search = re.compile(".*" if pattern == "*" else pattern)
    except re.error as error:
        raise ConfigError(
            f"{group.path}.{key}: {pattern!r} is no regular expression ({error}); give a part of a module's name"
        ) from None
    kinds = (nn.Linear, nn.Conv2d, nn.BatchNorm2d) if key == "related_modules" else None
    found = [
        name
        for name, module in model.named_modules()
        if search.search(name) and (isinstance(module, kinds) if kinds else can_take(module, group.technique))
    ]
    if not found:
        raise ConfigError(
            f"{group.path}.{key}: no module that {group.technique} can change has {pattern!r} in its name; "
            "model.named_modules() lists the names"
        )
    return found


def assigned(model: nn.Module, groups: list[Group]) -> Iterator[tuple[Group, str]]:
    """(group, module's name). Errors: ConfigError for a module that two groups of a technique name."""
    taken: dict[tuple[str, str], str] = {}
    for group in groups:
        for pattern in group.modules:
            for name in matching(model, group, pattern):
                other = taken.setdefault((group.technique, name), f"{group.name}: {pattern!r}")
                if other != f"{group.name}: {pattern!r}":
                    raise ConfigError(
                        f"{group.path}.modules: {pattern!r} names {name}, which {other} names already; give each "
                        "module to one group"
                    )
                yield group, name
