# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel norms, as Megatron's: between layers that ranks share, each rank has a part of the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor.cutting.slices import as_adding
from deeptide.tensor.team import Team


def _rows(x: torch.Tensor, team: Team, dim: int) -> torch.Tensor:
    """(ranks, *part). Errors: ValueError if the positions do not divide."""
    if x.shape[dim] % team.size:
        raise ValueError(
            f"sequence-parallel layers: {x.shape[dim]} positions do not divide among {team.size} ranks; pad the "
            "sequences"
        )
    return torch.stack(x.chunk(team.size, dim))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team, dim: int, adds_up: bool) -> torch.Tensor:
        ctx.team, ctx.dim, ctx.adds_up = team, dim, adds_up
        return torch.cat(team.core.all_gather(x, "forward").unbind(0), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = _rows(gradient, ctx.team, ctx.dim)
        own = ctx.team.core.reduce_scatter(rows, "backward") if ctx.adds_up else rows[ctx.team.index]
        return own, None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team, dim: int, adds_up: bool) -> torch.Tensor:
        ctx.team, ctx.dim = team, dim
        rows = _rows(x, team, dim)
        return team.core.reduce_scatter(rows, "forward") if adds_up else rows[team.index].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.cat(ctx.team.core.all_gather(gradient, "backward").unbind(0), ctx.dim), None, None, None


def cut_sequence(x: torch.Tensor, team: Team, dim: int = 1, adds_up: bool = False) -> torch.Tensor:
    """This rank's positions of what all ranks have alike, or, with adds_up, of the sum of what they have.

    Shapes: (batch, length, …) -> (batch, length / ranks, …). Collective in backward. Errors: ValueError if the length
    does not divide among the ranks.
    """
    if isinstance(x, Elsewhere):
        return _rows(x, team, dim)[team.index]
    return _Cut.apply(x, team, dim, adds_up)  # type: ignore[no-any-return, no-untyped-call]


def joined_sequence(x: torch.Tensor, team: Team, dim: int = 1, adds_up: bool = False) -> torch.Tensor:
    """All positions. adds_up: what follows is shared by the ranks, so their gradients are summed. Collective.

    Shapes: (batch, length / ranks, …) -> (batch, length, …).
    """
    if isinstance(x, Elsewhere):
        return torch.cat([x] * team.size, dim)
    return _Joined.apply(x, team, dim, adds_up)  # type: ignore[no-any-return, no-untyped-call]


def sequence_parallel(module: nn.Module, team: Team) -> nn.Module:
    """Marks a layer, such as a norm, that is given a part of the positions: its gradients add up. Returns it."""
    as_adding(module, team)
    return module
