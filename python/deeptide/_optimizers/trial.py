# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Finds out what an unknown optimizer needs, by steps of a copy of it over small tensors, whole and cut."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from deeptide._C import ConfigError
from deeptide._optimizers.given import step_alone
from deeptide._process import generators

_SHAPES = ((6, 4), (5,))
_STEPS = 10
_RATE = 1e-2  # at the program's own, of a fine-tuning or a warm-up's begin, little moves or nothing
# Shares of the largest update. Kernels may round a tensor's last elements differently, and states may be fp32. A rule
# that looks beyond elements differs by more, a weight decay of 0.01 % included.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The class with its module; torch's own as users write it, "torch.optim.NAdam"."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def why_whole(optimizer: torch.optim.Optimizer) -> str:
    """Why it cannot step parts of parameters; empty if it can. Errors: ConfigError if it cannot step at all.

    Parts are stepped by copies of their own, as ranks do it: what depends on other elements shows as a difference.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {name_of(optimizer)}: its step() needs a closure that computes the loss again, and an engine's "
            "step has none; use an optimizer that steps from gradients, such as torch.optim.AdamW"
        )
    dtype = torch.float64
    try:
        whole = _trial(optimizer, dtype, cut=None)
    except Exception:  # it has kernels of its own, for fp32
        dtype = torch.float32
        try:
            whole = _trial(optimizer, dtype, cut=None)
        except Exception as error:
            raise ConfigError(
                f"optimizer {name_of(optimizer)} cannot step dense fp32 parameters: {type(error).__name__}: {error}"
            ) from error
    if not any(moved.any() for moved in whole):
        raise ConfigError(
            f"optimizer {name_of(optimizer)} does not move the parameters in its param_groups, so the engine cannot "
            "lend it others; it must read them there in each step"
        )
    try:
        cut = [_trial(optimizer, dtype, cut=half) for half in (0, 1)]
    except Exception as error:
        return f"it fails on a part of a parameter ({type(error).__name__}: {error})"
    for moved, parts in zip(whole, zip(*cut, strict=True), strict=True):
        if (moved.flatten() - torch.cat(parts)).abs().max() > _TOLERANCE[dtype] * moved.abs().max():
            return "its step of one element depends on others, as a trial showed"
    return ""


def kept_elsewhere(optimizer: torch.optim.Optimizer) -> str:
    """The attribute that changes from step to step outside of its `state`; empty if none.

    Neither checkpoints nor rewinds find it there. Numbers in groups are hyper-parameters, which they have.
    """
    looks: list[dict[str, list[Any]]] = []
    try:
        _trial(optimizer, torch.float32, cut=None, looks=looks)
    except Exception:  # who has no fp32 steps is refused elsewhere
        return ""
    first, last = looks[-2:]
    return next((place for place, held in last.items() if not _are_equal(held, first.get(place, []))), "")


def _are_equal(ones: list[Any], others: list[Any]) -> bool:
    def is_equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)

    return len(ones) == len(others) and all(map(is_equal, ones, others))


def _look(probe: torch.optim.Optimizer, values: list[torch.nn.Parameter]) -> dict[str, list[Any]]:
    """{place: copies of the tensors and numbers there}, of attributes and of what groups hold beside numbers."""
    lent = {value.untyped_storage().data_ptr() for value in values}
    places: dict[str, list[Any]] = {}
    for name, value in vars(probe).items():
        if name not in ("state", "param_groups", "defaults"):
            places[f"its attribute {name!r}"] = list(_leaves(value, lent))
    for group in probe.param_groups:
        for name, value in group.items():
            if name != "params":
                leaves = [v for v in _leaves(value, lent) if isinstance(v, torch.Tensor) and v.numel() > 1]
                places.setdefault(f"its groups' {name!r}", []).extend(leaves)
    return places


def _leaves(value: Any, lent: set[int], depth: int = 4) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.untyped_storage().data_ptr() not in lent:
            yield value.detach().clone()
    elif isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _leaves(entry, lent, depth - 1)


def _values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in _SHAPES]


def _halves(tensor: torch.Tensor, half: int | None) -> torch.Tensor:
    """The tensor, or of its elements one part in one dimension, which ends within a row."""
    middle = tensor.numel() // 2 + 1
    return tensor if half is None else tensor.flatten()[:middle] if half == 0 else tensor.flatten()[middle:]


def _trial(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, cut: int | None, looks: list[Any] | None = None
) -> list[torch.Tensor]:
    """How far the values move in a few steps. Gradients have a part that lasts: some rates grow with it.

    looks: takes what `_look` sees after each step.
    """
    kinds = _distinct_options(optimizer)
    before = [_halves(value, cut).to(dtype) for _ in kinds for value in _values()]
    values = [torch.nn.Parameter(value.clone()) for value in before]
    probe = _copy_without_state(optimizer, kinds, values)
    for group in probe.param_groups:
        _set_rate(group)
    generator = torch.Generator().manual_seed(1)
    lasting = [torch.randn(shape, generator=generator) for _ in kinds for shape in _SHAPES]
    with generators.kept():
        torch.manual_seed(0)
        for _ in range(_STEPS):
            for value, mean in zip(values, lasting, strict=True):
                gradient = mean + 0.5 * torch.randn(mean.shape, generator=generator)
                value.grad = _halves(gradient, cut).to(dtype)
            step_alone(probe)
            if looks is not None:
                looks.append(_look(probe, values))
    return [value.detach() - start for value, start in zip(values, before, strict=True)]


def _set_rate(group: dict[str, Any]) -> None:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.fill_(max(float(rate), _RATE))
    elif isinstance(rate, (int, float)):
        group["lr"] = max(rate, _RATE)


def _distinct_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' options, once each: groups may decay, be factored or be orthogonalized differently."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        kinds.setdefault(repr(sorted((key, value) for key, value in options.items() if key != "lr")), options)
    return list(kinds.values())


def _copy_without_state(
    optimizer: torch.optim.Optimizer, kinds: list[dict[str, Any]], values: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy with a group of each of these options, over as many parameters, without hooks and what wraps step()."""
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = probe
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):
            continue
        is_hooks = name.endswith("_hooks") and isinstance(value, dict)
        probe.__dict__[name] = OrderedDict() if is_hooks else _copied(value, memo)
    probe.__dict__["state"] = defaultdict(dict)
    each = len(_SHAPES)
    probe.__dict__["param_groups"] = [
        {**_copied(options, memo), "params": values[each * i : each * (i + 1)]} for i, options in enumerate(kinds)
    ]
    return probe


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # what cannot be copied, such as a generator or a lock, is shared
        return value
