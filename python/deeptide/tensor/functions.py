# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks that share layers, in forward and backward. All ranks of a team call each in one order.

Tensors of other stages of a pipeline have no bytes to exchange, on all ranks of a team alike.
"""

from __future__ import annotations

from typing import Any

import torch

from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.tensor.cutting.slices import Slice
from deeptide.tensor.team import Team


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: Team) -> torch.Tensor:
        return team.core.all_reduce(x, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Slice, team: Team) -> torch.Tensor:
        ctx.blocks, ctx.team = blocks, team
        return blocks.join(team.core.all_gather(x, "forward"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.blocks.cut(gradient, ctx.team), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Slice, team: Team) -> torch.Tensor:
        ctx.blocks, ctx.team = blocks, team
        return blocks.cut(x, team)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.blocks.join(ctx.team.core.all_gather(gradient, "backward")), None, None


def summed(x: torch.Tensor, team: Team) -> torch.Tensor:
    """The sum of the ranks' x, whose gradient is each rank's: what they share becomes what all have alike."""
    if isinstance(x, Elsewhere):
        return x
    return _Summed.apply(x, team)  # type: ignore[no-any-return, no-untyped-call]


def joined(x: torch.Tensor, blocks: Slice, team: Team) -> torch.Tensor:
    """All ranks' features. Shapes: (..., local) -> (..., whole), as `blocks` along the last dimension say."""
    if isinstance(x, Elsewhere):
        return blocks.join(torch.stack([x] * team.size))
    return _Joined.apply(x, blocks, team)  # type: ignore[no-any-return, no-untyped-call]


def cut(x: torch.Tensor, blocks: Slice, team: Team) -> torch.Tensor:
    """This rank's features. Shapes: (..., whole) -> (..., local)."""
    if isinstance(x, Elsewhere):
        return blocks.cut(x, team)
    return _Cut.apply(x, blocks, team)  # type: ignore[no-any-return, no-untyped-call]
