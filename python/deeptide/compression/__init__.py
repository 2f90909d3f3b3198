# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Smaller models by training: quantised weights and activations, pruning, fewer layers. docs/compression.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeptide.compression.cleaning import redundancy_clean
    from deeptide.compression.preparation import init_compression, student_initialization
    from deeptide.compression.schedule import CompressionSchedule

__all__ = ["CompressionSchedule", "init_compression", "redundancy_clean", "student_initialization"]

_HOMES = {"CompressionSchedule": "schedule", "redundancy_clean": "cleaning"}


def __getattr__(name: str) -> Any:
    """Loads a name's module when it is first used: an engine that compresses nothing loads none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'preparation')}"), name)
