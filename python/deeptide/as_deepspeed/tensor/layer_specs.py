# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes of tensor_parallel.partition_config, and the translation of a Transformers model's own plan."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deeptide._C import ConfigError

_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "colwise_rep": {"partition_type": "column", "gather_output": True},
    "embedding_rowwise": {"partition_type": "skip"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
    "rowwise": {"partition_type": "row"},
}


class PartitionType(enum.Enum):
    """How ranks share a layer."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


def _tuples(shape: Any) -> Any:
    return tuple(map(_tuples, shape)) if isinstance(shape, (list, tuple)) else shape


@dataclass
class TPLayerSpec:
    """One of "layer_specs": the layers whose weights' names match a pattern, and how they are shared."""

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Any = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.partition_type, str):
            self.partition_type = PartitionType(self.partition_type.lower())
        self.shape = _tuples(self.shape)

    def get_partition_dim(self) -> int:
        """The dimension that is cut."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether it names this parameter of a model of this type."""
        kinds = [kind.lower() for kind in self.model_types or ()]
        if kinds and str(model_type).lower() not in kinds:
            return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """The section, as an object."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """Takes a dictionary; keys that it does not know are left out."""
        known = {key: value for key, value in config_dict.items() if key in cls.__dataclass_fields__}
        specs = [TPLayerSpec(**spec) for spec in known.pop("layer_specs", [])]
        return cls(layer_specs=specs, **known)

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The first that names the parameter."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)


class TPPlanConverter:
    """Transformers' plans as layer_specs."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """A spec for each entry; None of an empty plan. Errors: ConfigError, a ValueError, naming unknown styles."""
        unknown = sorted({style for style in hf_tp_plan.values() if style.lower() not in _STYLES})
        if unknown:
            raise ConfigError(
                f"the model's tensor-parallel plan has an unsupported partition style: {', '.join(unknown)}; known are "
                f"{', '.join(_STYLES)}. Name the layers in tensor_parallel.partition_config"
            )
        specs = []
        for pattern, style in hf_tp_plan.items():
            name = TPPlanConverter._wildcard_to_regex(pattern)
            end = "$" if name.endswith(r"\.weight") else r"\.weight$"
            specs.append(TPLayerSpec([name + end], **_STYLES[style.lower()]))
        return specs or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """The plans of a model's configuration, class and instance as one; None without any.

    A later one says more; its "model.a" is the "a" of an earlier one.
    """
    plans = (
        getattr(getattr(model, "config", None), "base_model_tp_plan", None),
        getattr(type(model), "_tp_plan", None),
        getattr(model, "__dict__", {}).get("_tp_plan"),
    )
    merged: dict[str, str] = {}
    for plan in plans:
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            if not (pattern.startswith("model.") and pattern.removeprefix("model.") in merged):
                merged[pattern] = style
    return merged or None
