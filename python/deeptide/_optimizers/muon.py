# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters Muon orthogonalizes: param groups are split into matrices and the rest."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from deeptide import _C


def _memory_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Equal for tied parameters, also where one is a transpose of the other."""
    if parameter.numel() == 0:
        return id(parameter), -1
    return parameter.untyped_storage().data_ptr(), int(parameter.storage_offset())


def choice_of(model: torch.nn.Module, by_default: bool) -> Callable[[torch.Tensor], bool]:
    """A parameter's own `use_muon`, as DeepSpeed reads it; else its shape, its names, and no embedding's weight."""
    matrices: dict[tuple[int, int], bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        memory = _memory_of(parameter)
        matrices[memory] = matrices.get(memory, True) and _C.is_muon_matrix(name, list(parameter.shape))
    for module in model.modules():
        is_embedding = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and isinstance(module.weight, torch.nn.Parameter):  # else another stage has it
            matrices[_memory_of(module.weight)] = False

    def takes(parameter: torch.Tensor) -> bool:
        own = getattr(parameter, "use_muon", None)
        return by_default and matrices.get(_memory_of(parameter), False) if own is None else bool(own)

    return takes


def muon_groups(
    groups: list[dict[str, Any]], model: torch.nn.Module, by_default: bool, others: Container[int]
) -> tuple[list[dict[str, Any]], set[int]]:
    """The groups, each without a "use_muon" of its own split in two. `by_default`: the configuration's.

    others: indices of groups that other stages of a pipeline train, which may have either half; returned as they are
    after the split.
    """
    takes = choice_of(model, by_default)
    split: list[dict[str, Any]] = []
    kept: set[int] = set()
    for index, group in enumerate(groups):
        first = len(split)
        if "use_muon" in group:
            split.append(group)
            kept.update([first] if index in others else ())
            continue
        for use_muon in (True, False):
            params = [p for p in group["params"] if not isinstance(p, torch.Tensor) or takes(p) == use_muon]
            if params or index in others:
                split.append({**group, "params": params, "use_muon": use_muon})
        kept.update(range(first, len(split)) if index in others else ())
    return split, kept
