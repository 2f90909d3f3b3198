# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# A part of _C.pyi: layers of models. No module of its own.
from collections.abc import Callable, Sequence

import torch

from deeptide._C import Config

def sparse_attention_section(config: Config) -> dict[str, object]: ...
def check_sparsity(config: Config) -> None: ...
def sparse_layout(
    config: Config, num_heads: int, sequence_length: int, sample: Callable[[int, int], list[int]]
) -> torch.Tensor: ...
def compression_section(config: Config) -> str: ...
def compression_groups(config: Config) -> str: ...
def largest_eigenvalue(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    max_iter: int,
    tol: float,
    stability: float,
    scale: float,
) -> tuple[float, int]: ...
def check_transformer_layer(
    hidden_size: int,
    heads: int,
    attn_dropout_ratio: float,
    hidden_dropout_ratio: float,
    num_hidden_layers: int,
    initializer_range: float,
    adjust_init_range: bool,
) -> None: ...
