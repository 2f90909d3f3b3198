# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel norms, as Megatron's: between layers that ranks share, each rank has a part of the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor.cutting.slices import as_adding, rows_of
from deeptide.tensor.entry import entered
from deeptide.tensor.team import Team


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team, dim: int) -> torch.Tensor:
        ctx.team, ctx.dim = team, dim
        return torch.cat(team.core.all_gather(x, "forward").unbind(0), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rows_of(gradient, ctx.team, ctx.dim)[ctx.team.index], None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team, dim: int, adds_up: bool) -> torch.Tensor:
        ctx.team, ctx.dim = team, dim
        rows = rows_of(x, team, dim)
        return team.core.reduce_scatter(rows, "forward") if adds_up else rows[team.index].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.cat(ctx.team.core.all_gather(gradient, "backward").unbind(0), ctx.dim), None, None, None


def cut_sequence(x: torch.Tensor, team: Team, dim: int = 1, adds_up: bool = False) -> torch.Tensor:
    """This rank's positions of what all ranks have alike, or, with adds_up, of the sum of what they have.

    Shapes: (batch, length, …) -> (batch, length / ranks, …). Collective in backward. Errors: ValueError if the length
    does not divide among the ranks.
    """
    if isinstance(x, Elsewhere):
        return rows_of(x, team, dim)[team.index]
    return _Cut.apply(x, team, dim, adds_up)  # type: ignore[no-any-return, no-untyped-call]


def joined_sequence(x: torch.Tensor, team: Team, dim: int = 1, adds_up: bool = False) -> torch.Tensor:
    """All positions. adds_up: what follows is shared by the ranks, so their gradients are summed. Collective.

    Shapes: (batch, length / ranks, …) -> (batch, length, …).
    """
    if adds_up:
        return entered(x, team, dim)
    if isinstance(x, Elsewhere):
        return torch.cat([x] * team.size, dim)
    return _Joined.apply(x, team, dim)  # type: ignore[no-any-return, no-untyped-call]


def sequence_parallel(module: nn.Module, team: Team) -> nn.Module:
    """Marks a layer, such as a norm, that is given a part of the positions: its gradients add up. Returns it."""
    as_adding(module, team)
    return module
