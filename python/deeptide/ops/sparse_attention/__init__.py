# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention under DeepSpeed's names: layouts, attention modules, and help for Transformers' models."""

from deeptide.ops.sparse_attention.attention import (
    BertSparseSelfAttention,
    SparseSelfAttention,
    block_mask,
    sparse_attention,
)
from deeptide.ops.sparse_attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    from_config,
)
from deeptide.ops.sparse_attention.models import SparseAttentionUtils, use_in_transformers

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "block_mask",
    "from_config",
    "sparse_attention",
    "use_in_transformers",
]
