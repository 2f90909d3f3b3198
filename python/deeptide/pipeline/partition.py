# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which stage has which layers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._process import generators
from deeptide.pipeline.layers import LayerSpec


def balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of parts whose sums differ little, by DeepSpeed's rule, so that a model is cut as it cuts it."""
    return _C.balanced_bounds([float(weight) for weight in weights], num_parts)


def _built(layer: Any) -> Any:
    """The layer, on the meta device where it needs no memory to be looked at."""
    if not isinstance(layer, LayerSpec):
        return layer
    with generators.kept():
        try:
            with torch.device("meta"):
                return layer.build()
        except (RuntimeError, NotImplementedError):  # it computes with its values as it is made
            return layer.build()


def num_trained(layer: Any) -> int:
    """Elements of a layer's parameters that require a gradient; a specification is built without memory."""
    built = _built(layer)
    parameters = built.parameters() if isinstance(built, torch.nn.Module) else ()
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _class_name(layer: Any) -> str:
    kind = layer.typename if isinstance(layer, LayerSpec) else type(layer)
    name = layer.__name__ if not isinstance(layer, (LayerSpec, torch.nn.Module)) else kind.__name__
    return str(name)


def _matches(pattern: str) -> Callable[[Any], int]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method 'type:{pattern}': no regular expression: {error}") from None
    return lambda layer: int(bool(compiled.search(_class_name(layer))))


def bounds_of(
    layers: Sequence[Any], num_stages: int, method: str, measured: Callable[[], list[int]] | None = None
) -> list[int]:
    """By "uniform", by trained "parameters", or by how many layers have a class of a name that "type:REGEX" finds.

    measured: gives the bounds by "profile" and "memory".
    """
    kind, _, pattern = method.partition(":")
    if method.lower() == "uniform":
        bounds = _C.uniform_bounds(len(layers), num_stages)
    elif method.lower() == "parameters":
        bounds = balanced([num_trained(layer) for layer in layers], num_stages)
    elif kind.lower() == "type" and pattern:
        weights = list(map(_matches(pattern), layers))
        if not any(weights):
            names = ", ".join(sorted({_class_name(layer) for layer in layers}))
            raise ConfigError(f"partition_method {method!r}: it finds none of the layers' classes, which are {names}")
        bounds = balanced(weights, num_stages)
    elif method.lower() in ("profile", "memory"):
        if measured is None:
            raise ConfigError(f"partition_method {method!r}: give profile_input, the inputs of a micro-batch")
        has_enough = 1 < num_stages <= len(layers)
        bounds = measured() if has_enough else _C.uniform_bounds(len(layers), num_stages)
    else:
        raise NotImplementedError(
            f"partition_method: got {method!r}, expected 'uniform', 'parameters', 'profile', 'memory' or 'type:REGEX'"
        )
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == end:
            raise ConfigError(
                f"partition_method {method!r}: stage {stage} of {num_stages} has none of the {len(layers)} layers; "
                "take fewer stages, or another method"
            )
    return bounds
