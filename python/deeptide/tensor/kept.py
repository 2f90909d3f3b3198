# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what autograd saves in parts, one on each of the ranks that share layers and have it alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from deeptide.tensor.team import Team

_LEAST = 4096  # elements: less is kept whole


class _Part(NamedTuple):
    """A rank's part of a flat tensor."""

    values: torch.Tensor  # (ceil(numel / ranks),), zeros at the end of the last one
    sums: torch.Tensor  # of the whole tensor, which the ranks have alike
    shape: torch.Size
    device: torch.device
    row: object = None  # holds the memory of the values, where that is somebody's


def partitioned(
    team: Team,
    on_cpu: bool = False,
    keep: Callable[[torch.Tensor, torch.device], tuple[torch.Tensor, object]] | None = None,
) -> AbstractContextManager[Any]:
    """Within, ranks of the team save 1 / ranks of each floating tensor, and gather it in backward.

    For tensors that the ranks have alike, as the arguments of a block are. on_cpu: parts lie in CPU memory.
    keep: copies a part to a device, and returns what holds the copy's memory too. Errors: ValueError if a tensor is not
    alike: in forward if it is the first of its shape, else in backward, where sums travel with the parts.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Part:
        if not tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter) or tensor.numel() < _LEAST:
            return tensor
        sums = _sums_of(tensor)
        _check_alike(team, tensor, sums)
        numel = -(-tensor.numel() // team.size)
        own = tensor.detach().reshape(-1)[team.index * numel : (team.index + 1) * numel]
        values = F.pad(own, (0, numel - own.numel())) if own.numel() < numel else own
        device = torch.device("cpu") if on_cpu else tensor.device
        if keep is not None:
            kept, row = keep(values, device)
            return _Part(kept, sums, tensor.shape, tensor.device, row)
        return _Part(values.to(device, copy=values is own), sums, tensor.shape, tensor.device)

    def unpack(kept: torch.Tensor | _Part) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        own = torch.cat([kept.values.to(kept.device), kept.sums.view(kept.values.dtype)])
        rows, count = team.core.all_gather(own, "backward"), kept.values.numel()
        told = rows[:, count:].contiguous().view(torch.float64)
        _compare(team, told, kept.shape)
        return rows[:, :count].reshape(-1)[: kept.shape.numel()].view(kept.shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of its values and of their absolute ones: (2,), fp64."""
    values = tensor.detach()
    return torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])


def _compare(team: Team, told: torch.Tensor, shape: torch.Size) -> None:
    if not torch.equal(told, told[:1].expand_as(told)) and not told.isnan().any():
        raise ValueError(
            f"partition_activations: a tensor of shape {tuple(shape)} that is kept for backward differs among the "
            f"{team.size} ranks that share layers, so each needs its own: leave partition_activations out"
        )


def _check_alike(team: Team, tensor: torch.Tensor, sums: torch.Tensor) -> None:
    if tensor.shape in team.alike:
        return
    _compare(team, team.core.all_gather(sums.cpu(), "forward"), tensor.shape)
    team.alike.add(tensor.shape)
