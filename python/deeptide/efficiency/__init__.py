# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Less work for the same model: curricula of samples, random-LTD, batches by length. docs/data-efficiency.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeptide.efficiency.analyzer import DataAnalyzer, DistributedDataAnalyzer
    from deeptide.efficiency.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
    from deeptide.efficiency.layer_drop import drop_layers
    from deeptide.efficiency.packing import PackedDataset, PackingCollator, block_diagonal_mask, pack_lengths
    from deeptide.efficiency.random_ltd import RandomLayerTokenDrop, convert_to_random_ltd
    from deeptide.efficiency.variable_batches import (
        VariableBatchSizeLR,
        batch_by_seqlens,
        get_dataloader_and_lr_scheduler_for_variable_batch_size,
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
        scale_lr,
    )

__all__ = [
    "DataAnalyzer",
    "DistributedDataAnalyzer",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "PackedDataset",
    "PackingCollator",
    "RandomLayerTokenDrop",
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "block_diagonal_mask",
    "convert_to_random_ltd",
    "drop_layers",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "pack_lengths",
    "scale_lr",
]

_HOMES = {
    "DataAnalyzer": "analyzer",
    "DistributedDataAnalyzer": "analyzer",
    "MMapIndexedDataset": "indexed_dataset",
    "MMapIndexedDatasetBuilder": "indexed_dataset",
    "PackedDataset": "packing",
    "PackingCollator": "packing",
    "RandomLayerTokenDrop": "random_ltd",
    "block_diagonal_mask": "packing",
    "convert_to_random_ltd": "random_ltd",
    "drop_layers": "layer_drop",
    "pack_lengths": "packing",
}


def __getattr__(name: str) -> Any:
    """Loads a name's module when it is first used: an engine that leaves nothing out loads none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'variable_batches')}"), name)
