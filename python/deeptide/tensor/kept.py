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
    keep: copies a part to a device, and returns what holds the copy's memory too. Errors: ValueError if the first
    tensor of its shape is not alike.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Part:
        if not tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter) or tensor.numel() < _LEAST:
            return tensor
        _check_alike(team, tensor)
        numel = -(-tensor.numel() // team.size)
        own = tensor.detach().reshape(-1)[team.index * numel : (team.index + 1) * numel]
        values = F.pad(own, (0, numel - own.numel())) if own.numel() < numel else own
        device = torch.device("cpu") if on_cpu else tensor.device
        if keep is not None:
            kept, row = keep(values, device)
            return _Part(kept, tensor.shape, tensor.device, row)
        return _Part(values.to(device, copy=values is own), tensor.shape, tensor.device)

    def unpack(kept: torch.Tensor | _Part) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        rows = team.core.all_gather(kept.values.to(kept.device), "backward")
        return rows.reshape(-1)[: kept.shape.numel()].view(kept.shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _check_alike(team: Team, tensor: torch.Tensor) -> None:
    if tensor.shape in team.alike:
        return
    values = tensor.detach().double()
    told = team.core.all_gather(torch.stack([values.sum(), values.abs().sum()]).cpu(), "forward")
    if not torch.equal(told, told[:1].expand_as(told)) and not told.isnan().any():
        raise ValueError(
            f"partition_activations: a tensor of shape {tuple(tensor.shape)} that is kept for backward differs among "
            f"the {team.size} ranks that share layers, so each needs its own: leave partition_activations out"
        )
    team.alike.add(tensor.shape)
