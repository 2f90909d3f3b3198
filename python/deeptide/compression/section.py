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
TECHNIQUES = (
    "weight_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
    "activation_quantization",
)
_NEEDED = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
}
_PRUNING_NEEDS = ("dense_ratio",)


@dataclasses.dataclass(frozen=True)
class Group:
    """One of a technique's "different_groups"; `params` holds the shared parameters too."""

    technique: str
    name: str
    params: dict[str, Any]
    modules: list[str]
    related: list[list[str]]

    @property
    def path(self) -> str:
        """Its keys, for errors."""
        return OLDER if self.name == OLDER else f"{SECTION}.{self.technique}.different_groups.{self.name}"


def read_section(config: Config) -> dict[str, Any]:
    """The section with its defaults; "quantize_training" becomes a group of it. Errors: ConfigError for both."""
    section: dict[str, Any] = json.loads(_C.config_section(config, SECTION))
    older = read_older(config)
    if older["enabled"]:
        if _is_on(section["weight_quantization"]):
            raise ConfigError(f"{OLDER}.enabled: true, and {SECTION}.weight_quantization is on; turn one of them off")
        section["weight_quantization"] = _in_newer_form(older)
    return section


def read_older(config: Config) -> dict[str, Any]:
    """The section "quantize_training" with its defaults."""
    section: dict[str, Any] = json.loads(_C.config_section(config, OLDER))
    return section


def _in_newer_form(older: dict[str, Any]) -> dict[str, Any]:
    schedule, how = older["quantize_schedule"], older["quantize_algo"]
    return {
        "shared_parameters": {
            "enabled": True,
            "schedule_offset": schedule["schedule_offset"],
            "quantize_groups": older["quantize_groups"],
            "quantize_verbose": older["quantize_verbose"],
            "quantization_type": how["q_type"],
            "rounding": how["rounding"],
            "quantize_weight_in_forward": False,
            "fp16_mixed_quantize": older["fp16_mixed_quantize"],
        },
        "different_groups": {
            OLDER: {
                "params": {**older["quantize_bits"], "quantization_period": schedule["quantize_period"]},
                "modules": ["*"],
            }
        },
    }


def _is_on(part: dict[str, Any]) -> bool:
    return bool(part["shared_parameters"]["enabled"])


def groups_of(section: dict[str, Any]) -> list[Group]:
    """Those of all techniques that are on, in the order in which they are made final. Errors: ConfigError."""
    found = []
    for technique in TECHNIQUES:
        part = section[technique]
        if not _is_on(part):
            continue
        if not part["different_groups"]:
            raise ConfigError(f"{SECTION}.{technique}.different_groups: names no group; name at least one")
        for name, group in part["different_groups"].items():
            own = {key: value for key, value in group["params"].items() if value is not None}
            related = group.get("related_modules") or []
            found.append(Group(technique, name, {**part["shared_parameters"], **own}, group["modules"], related))
            for key in _NEEDED.get(technique, _PRUNING_NEEDS):
                if key not in own:
                    raise ConfigError(f"{found[-1].path}.params.{key}: is missing; give it")
            _check(found[-1])
    return found


def _check(group: Group) -> None:
    """Refuses what does not fit together. Errors: ConfigError naming the key."""
    if group.technique == "weight_quantization":
        _check_bits(group)
    elif group.technique == "activation_quantization" and group.params["bits"] not in (4, 8):
        raise ConfigError(f"{group.path}.params.bits: got {group.params['bits']}, expected 4 or 8")
    elif group.technique == "head_pruning":
        shared = f"{SECTION}.head_pruning.shared_parameters"
        if group.params["method"] != "topk":
            raise ConfigError(f'{shared}.method: got "{group.params["method"]}", expected "topk": heads have scores')
        if group.params.get("num_heads") is None:
            raise ConfigError(f"{shared}.num_heads: is missing; give the heads of a layer")
    _check_related(group)


def _check_bits(group: Group) -> None:
    params = group.params
    start, target = params["start_bits"], params["target_bits"]
    shared = f"{SECTION}.weight_quantization.shared_parameters"
    if target > start:
        raise ConfigError(
            f"{group.path}.params.target_bits: {target} exceeds start_bits, {start}; bits fall, so give a lower one"
        )
    if target > 2:
        pass
    elif params["quantization_type"] != "symmetric":
        raise ConfigError(f'{shared}.quantization_type: "asymmetric" has no {target} bits; set it to "symmetric"')
    elif params["rounding"] != "nearest":
        raise ConfigError(f'{shared}.rounding: "stochastic" has no {target} bits; set it to "nearest"')
    if params["quantize_weight_in_forward"] and params["fp16_mixed_quantize"]["enabled"]:
        raise ConfigError(
            f"{shared}.fp16_mixed_quantize.enabled: true has no effect with quantize_weight_in_forward; set one of "
            "them to false"
        )


def _check_related(group: Group) -> None:
    if not group.related:
        return
    if "pruning" not in group.technique or group.technique == "sparse_pruning":
        raise ConfigError(f"{group.path}.related_modules: {group.technique} changes no shapes; leave it out")
    if len(group.related) != len(group.modules):
        raise ConfigError(
            f"{group.path}.related_modules: got {len(group.related)} entries, expected one for each of modules, "
            f"{len(group.modules)}"
        )
    for entry in group.related:
        if not isinstance(entry, list) or not all(isinstance(pattern, str) for pattern in entry):
            raise ConfigError(f"{group.path}.related_modules: got the entry {entry!r}, expected a list of patterns")


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
