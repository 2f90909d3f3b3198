# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, of each of whose experts neighbouring ranks have a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deeptide.tensor.cutting.slices import Slice, become, cut_parameter
from deeptide.tensor.entry import entered
from deeptide.tensor.functions import summed
from deeptide.tensor.team import Team

# Transformers' styles, as of 5.x, of the two weights that all experts have together.
STYLES = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_ALIGNED = 8  # features: torch's grouped products take rows of a multiple of 16 bytes, in 16 bits too


class SlicedExperts(nn.Module):
    """Transformers' experts over slices of their inner features: mixed into their class.

    The experts' choice is made before, alike on all ranks.
    """

    tensor_team: Team

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Shapes: (tokens, width), (tokens, k), (tokens, k) -> (tokens, width), summed."""
        team = self.tensor_team
        return summed(super().forward(entered(hidden_states, team), top_k_index, entered(top_k_weights, team)), team)


def slices_of_experts(module: nn.Module) -> dict[str, Slice]:
    """The slices of the weights: gates beside ups (E, 2 I, D), downs (E, D, I). Empty where they are others."""
    gate_up, down = (module._parameters.get(name) for name in STYLES)
    if gate_up is None or down is None or len(list(module.parameters())) != len(STYLES):
        return {}
    if gate_up.dim() != 3 or down.dim() != 3:
        return {}
    inner = down.shape[2]
    if gate_up.shape != (down.shape[0], 2 * inner, down.shape[1]):
        return {}
    return {"gate_up_proj": Slice(1, (inner, inner)), "down_proj": Slice(2, (inner,))}


def divides(module: nn.Module, ranks: int) -> bool:
    """Whether the experts' inner features divide among ranks into slices that grouped products take."""
    return slices_of_experts(module)["down_proj"].blocks[0] % (ranks * _ALIGNED) == 0


def as_sliced_experts(module: nn.Module, team: Team) -> None:
    """Leaves this rank's slices in experts that are whole and equal on all ranks."""
    module.tensor_team = team  # type: ignore[assignment]
    for name, slice_ in slices_of_experts(module).items():
        cut_parameter(module, name, slice_, team)
    become(module, SlicedExperts)
