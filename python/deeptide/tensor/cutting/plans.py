# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are cut, and how: by its own plan, by patterns of the configuration, or by names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from deeptide._C import ConfigError
from deeptide.tensor import experts
from deeptide.tensor.layers import features_of, is_linear

COLUMN, ROW, VOCABULARY, HEADS, ADDING, WHOLE = "column", "row", "vocabulary", "heads", "adding", "whole"
EXPERTS, LATENT = "experts", "latent"


@dataclasses.dataclass(frozen=True)
class Cut:
    """The cut of one layer. `meets_whole`: gathers its outputs, or takes whole inputs."""

    kind: str
    meets_whole: bool = False
    blocks: tuple[int, ...] | None = None


Plan = dict[str, Cut]

# Transformers' names of styles, as of 5.x.
_STYLES = {
    "colwise": Cut(COLUMN),
    "colwise_gather_output": Cut(COLUMN, True),
    "colwise_rep": Cut(COLUMN, True),
    "rowwise": Cut(ROW),
    "rowwise_split_input": Cut(ROW, True),
    "rowwise_rep": Cut(ROW, True),
    "embedding_rowwise": Cut(VOCABULARY),
    "replicated_with_grad_allreduce": Cut(ADDING),
    "replicate": Cut(WHOLE),
    "mla_kv_a_proj": Cut(LATENT),
}
_OF_EXPERTS = "moe_tp_experts"


def _expand(model: nn.Module, patterns: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """(path, style): a * of a pattern is a number."""
    compiled = [
        (re.compile(r"\d+".join(map(re.escape, pattern.split("*")))), style) for pattern, style in patterns.items()
    ]
    names = [path for path, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        for pattern, style in compiled:
            if pattern.fullmatch(name):
                yield name, style


def model_within(model: Any) -> tuple[str, Any]:
    """(path, the model that the adapters of a PeftModel were put into); any other model is that itself."""
    within = model.get_base_model() if hasattr(model, "get_base_model") else model
    return next((path for path, module in model.named_modules() if module is within), ""), within


def _own_styles(model: nn.Module) -> list[tuple[str, str]]:
    prefix, within = model_within(model)
    patterns = getattr(within, "_tp_plan", None)
    found = _expand(within, patterns) if isinstance(patterns, Mapping) else ()
    return [(f"{prefix}.{path}" if prefix else path, style) for path, style in found]


def experts_of(model: nn.Module) -> list[str]:
    """The mixtures of experts that a model's own plan names."""
    return [path for path, style in _own_styles(model) if style == _OF_EXPERTS]


def _plan_of_experts(modules: Mapping[str, nn.Module], styles: Mapping[str, str], mixtures: Iterable[str]) -> Plan:
    """Those of Transformers' form, with its styles. Others stay whole: all ranks compute them alike."""
    return {
        path: Cut(EXPERTS)
        for path in mixtures
        if experts.slices_of_experts(modules[path])
        and all(styles.get(f"{path}.{name}") == style for name, style in experts.STYLES.items())
    }


def own_plan(model: nn.Module) -> Plan:
    """The plan that a model of Transformers brings; empty if it has none. Errors: ConfigError naming unknown styles."""
    modules = dict(model.named_modules())
    styles = _own_styles(model)
    mixtures = [path for path, style in styles if style == _OF_EXPERTS]
    plan = _plan_of_experts(modules, dict(styles), mixtures)
    for path, style in styles:
        if any(path == whole or path.startswith(f"{whole}.") for whole in mixtures):
            continue
        cut = _STYLES.get(style)
        module = modules.get(path)
        if cut is None or module is None:
            raise ConfigError(
                f"{type(model).__name__}'s own tensor-parallel plan cuts '{path}' in the style \"{style}\", which is "
                f"not supported yet; known are {', '.join(sorted(_STYLES))}. Name the layers to cut in "
                "tensor_parallel.partition_config"
            )
        within: Any = module._modules.get("original_module", module)  # of PEFT's modules_to_save
        if cut.kind == VOCABULARY and not isinstance(within, nn.Embedding):
            continue
        plan[path] = cut if cut.kind != LATENT else Cut(LATENT, blocks=_blocks_of_latent(model, path, module))
    return {path: cut for path, cut in plan.items() if cut.kind != WHOLE}


def _blocks_of_latent(model: Any, path: str, module: nn.Module) -> tuple[int, int]:
    rotary = getattr(model.config.get_text_config(), "qk_rope_head_dim", 0)
    if not is_linear(module) or not 0 < rotary < features_of(module)[1]:
        raise ConfigError(
            f"'{path}' is to give keys' latent and rotary parts, and no qk_rope_head_dim of the model's config fits; "
            "leave it out of the model's tensor-parallel plan"
        )
    return features_of(module)[1] - rotary, rotary


# -- DeepSpeed's partition_config ------------------------------------------------------------------------------------

_TYPES = {"column": COLUMN, "row": ROW, "skip": WHOLE}


def _check_spec(number: int, spec: Any) -> None:
    where = f"tensor_parallel.partition_config.layer_specs[{number}]"
    known = {"patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce"}
    if not isinstance(spec, Mapping) or not spec.get("patterns"):
        raise ConfigError(f"{where}: got {spec!r}, expected an object with patterns and partition_type")
    unknown = set(spec) - known
    if unknown:
        raise ConfigError(f"{where}: unknown {sorted(unknown)[0]!r}; expected one of {', '.join(sorted(known))}")
    if spec.get("partition_type", "column") not in _TYPES:
        raise ConfigError(f'{where}.partition_type: got {spec["partition_type"]!r}, expected "column", "row" or "skip"')


def _blocks_of(shape: Any, features: int, where: str) -> tuple[int, ...] | None:
    """The blocks of a "shape" such as [3, -1] or [[64, 16, 16], -1], in rows of the weight."""
    if shape is None:
        return None
    first = shape[0] if isinstance(shape, (list, tuple)) and len(shape) == 2 else None
    if isinstance(first, int) and first > 0 and features % first == 0:
        return (features // first,) * first
    if isinstance(first, (list, tuple)) and sum(first) == features:
        return tuple(int(size) for size in first)
    raise ConfigError(
        f"{where}.shape: got {shape!r}, expected [number of equal parts, -1] or [[sizes], -1] of {features} features"
    )


def plan_of_specs(model: nn.Module, specs: Iterable[Any], begin: Plan) -> Plan:
    """`begin`, changed by DeepSpeed's layer_specs: regular expressions of parameters' names."""
    plan = dict(begin)
    modules = dict(model.named_modules())
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for number, spec in enumerate(specs):
        _check_spec(number, spec)
        where = f"tensor_parallel.partition_config.layer_specs[{number}]"
        if spec.get("model_types") and model_type not in spec["model_types"]:
            continue
        kind = _TYPES[spec.get("partition_type", "column")]
        found, other = False, dict[str, str]()
        for path, module in modules.items():
            if module._parameters.get("weight") is None:
                continue
            if not any(re.match(pattern, f"{path}.weight") for pattern in spec["patterns"]):
                continue
            if kind != WHOLE and not is_linear(module):  # as ".*\\.weight$" matches norms
                other[path] = type(module).__name__
                continue
            found = True
            plan.pop(path, None)
            if kind == WHOLE:
                continue
            features = features_of(module)[1 if kind == COLUMN else 0]
            blocks = _blocks_of(spec.get("shape"), features, where) if kind == COLUMN else None
            plan[path] = Cut(kind, bool(spec.get("gather_output")) and kind == COLUMN, blocks)
        if not found and other:
            path, name = next(iter(other.items()))
            raise ConfigError(f"{where} matches '{path}', a {name}; expected linear layers")
        if not found and not spec.get("model_types"):
            raise ConfigError(f"{where}: no layer of the model matches {list(spec['patterns'])}")
    return plan
