# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: layers that neighbouring ranks share, and models as they are, cut by rule."""

from deeptide.tensor.cutting.split import split_model
from deeptide.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from deeptide.tensor.losses import vocab_parallel_cross_entropy
from deeptide.tensor.sequence import cut_sequence, joined_sequence, sequence_parallel
from deeptide.tensor.team import Team, make_team, team_of

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "Team",
    "VocabParallelEmbedding",
    "cut_sequence",
    "joined_sequence",
    "make_team",
    "sequence_parallel",
    "split_model",
    "team_of",
    "vocab_parallel_cross_entropy",
]
