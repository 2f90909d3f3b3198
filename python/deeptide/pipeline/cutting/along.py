# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The places at which a model is cut into parts: between blocks, or between calls of any modules."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deeptide.pipeline.cutting.blocks import Chain, bounds_of_blocks, find_blocks, parts_of_blocks, uses_of_modules
from deeptide.pipeline.cutting.calls import Calls, cut_calls
from deeptide.pipeline.cutting.chunks import BY_OPERATOR


class Along(NamedTuple):
    """Blocks in the order of the program, bounds of the parts' blocks, and by a module's id the parts that use it."""

    chain: Chain | Calls
    bounds: list[int]
    uses: dict[int, list[int]]

    @property
    def parts(self) -> list[int]:
        """The part of each block."""
        return parts_of_blocks(self.bounds)


def find_cut(model: torch.nn.Module, num_stages: int, num_chunks: int, starts: list[str] | None) -> Along:
    """Looks at a model that is whole. starts: as `starts_of` gives them. Errors: ConfigError if it cannot be cut so."""
    num_parts = num_stages * num_chunks
    if starts == BY_OPERATOR:
        calls, bounds = cut_calls(model, num_parts)
        return Along(calls, bounds, calls.uses(model, parts_of_blocks(bounds)))
    chain = find_blocks(model, num_stages, num_chunks)
    bounds = bounds_of_blocks(model, chain, num_parts, starts)
    return Along(chain, bounds, uses_of_modules(model, chain, parts_of_blocks(bounds)))
