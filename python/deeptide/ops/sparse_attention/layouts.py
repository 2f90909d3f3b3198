# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a sequence attend to which: DeepSpeed's SparsityConfig classes over the core's layouts."""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar

import torch

from deeptide import _C
from deeptide.config import ConfigSource, load_config

_COMMON = ("block", "different_layout_per_head")


def _sample(population: int, count: int) -> list[int]:
    return random.sample(range(population), count)


class SparsityConfig:
    """The common part of all layouts; a class of your own adds make_layout(seq_len).

    Args:
        num_heads: heads of the attention.
        block: elements of a block's side; a sequence's length is a multiple of it.
        different_layout_per_head: whether each head has a layout of its own; else all have the first one's.

    Random blocks come from Python's `random`: seed it alike on all ranks.

    """

    _mode: ClassVar[str | None] = None
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, **fields: object
    ) -> None:
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        for name, value in fields.items():
            setattr(self, name, value)
        if fields.get("attention", "bidirectional") not in ("bidirectional", "unidirectional"):
            raise NotImplementedError(
                f"attention is {fields['attention']!r}, expected 'bidirectional' or 'unidirectional'"
            )
        if self._mode is not None:
            _C.check_sparsity(self._section())

    def _section(self) -> _C.Config:
        names = (*_COMMON, *self._fields)
        section = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return _C.Config.from_text(json.dumps({"sparse_attention": {"mode": self._mode, **section}}), "<sparsity>")

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Returns zeros (num_heads, B, B) int64 for B = seq_len / block. Errors: ValueError if it does not divide."""
        if seq_len % self.block != 0:
            raise ValueError(f"the sequence's length is {seq_len}, expected a multiple of the block, {self.block}")
        side = seq_len // self.block
        return torch.zeros((self.num_heads, side, side), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """Copies the first head's layout to the others, unless each has its own; returns `layout`."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1].clone()
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Returns 1 where blocks attend, else 0: (num_heads, seq_len / block, seq_len / block) int64."""
        if self._mode is None:
            raise NotImplementedError(f"{type(self).__name__} has no layout: use a class that derives from it")
        return _C.sparse_layout(self._section(), self.num_heads, seq_len, _sample)


class DenseSparsityConfig(SparsityConfig):
    """All blocks attend to all."""

    _mode = "dense"

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        super().__init__(num_heads, block, different_layout_per_head)


class FixedSparsityConfig(SparsityConfig):
    """Local windows, and blocks of each that all later windows, or all windows, attend to (arXiv:1904.10509).

    Args:
        num_local_blocks: blocks of a window.
        num_global_blocks: blocks that stand for a window, its last ones; divides num_local_blocks.
        attention: "bidirectional", or "unidirectional": no block attends to one after it.
        horizontal_global_attention: whether those blocks attend to all as well; bidirectional only.
        num_different_global_patterns: how many choices of such blocks the heads take in turn.

    """

    _mode = "fixed"
    _fields = (
        "num_local_blocks",
        "num_global_blocks",
        "attention",
        "horizontal_global_attention",
        "num_different_global_patterns",
    )

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(
            num_heads,
            block,
            different_layout_per_head,
            num_local_blocks=num_local_blocks,
            num_global_blocks=num_global_blocks,
            attention=attention,
            horizontal_global_attention=horizontal_global_attention,
            num_different_global_patterns=num_different_global_patterns,
        )


class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, global blocks of given places, and random blocks.

    Args:
        num_random_blocks: random blocks in each row.
        local_window_blocks: blocks of each window; the last size goes on to the end.
        global_block_indices: blocks that all attend to, or where ranges of them begin.
        global_block_end_indices: where those ranges end, exclusive.
        attention, horizontal_global_attention: as of FixedSparsityConfig.

    """

    _mode = "variable"
    _fields = (
        "num_random_blocks",
        "local_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
        "attention",
        "horizontal_global_attention",
    )

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: list[int] | None = None,
        global_block_indices: list[int] | None = None,
        global_block_end_indices: list[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(
            num_heads,
            block,
            different_layout_per_head,
            num_random_blocks=num_random_blocks,
            local_window_blocks=[4] if local_window_blocks is None else local_window_blocks,
            global_block_indices=[0] if global_block_indices is None else global_block_indices,
            global_block_end_indices=global_block_end_indices,
            attention=attention,
            horizontal_global_attention=horizontal_global_attention,
        )


class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a sliding window, and first blocks that attend to all and all attend to (arXiv:2007.14062)."""

    _mode = "bigbird"
    _fields = ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "attention")

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(
            num_heads,
            block,
            different_layout_per_head,
            num_random_blocks=num_random_blocks,
            num_sliding_window_blocks=num_sliding_window_blocks,
            num_global_blocks=num_global_blocks,
            attention=attention,
        )


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given blocks that attend to all and all attend to (arXiv:2004.05150, in blocks)."""

    _mode = "bslongformer"
    _fields = ("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices", "attention")

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: list[int] | None = None,
        global_block_end_indices: list[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(
            num_heads,
            block,
            different_layout_per_head,
            num_sliding_window_blocks=num_sliding_window_blocks,
            global_block_indices=[0] if global_block_indices is None else global_block_indices,
            global_block_end_indices=global_block_end_indices,
            attention=attention,
        )


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone; one-way by default."""

    _mode = "local_sliding_window"
    _fields = ("num_sliding_window_blocks", "attention")

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block, num_sliding_window_blocks=num_sliding_window_blocks, attention=attention)


_CLASSES: tuple[type[SparsityConfig], ...] = (
    DenseSparsityConfig,
    FixedSparsityConfig,
    VariableSparsityConfig,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)


def from_config(config: ConfigSource, num_heads: int) -> SparsityConfig:
    """Returns the layout of a configuration's section "sparse_attention", of its defaults where it is absent.

    Args:
        config: as of `initialize`: a dict, a path, or a Config.
        num_heads: heads of the attention, which the section does not hold.
    Errors: ValueError for settings that exclude each other.

    """
    section: dict[str, Any] = {**_C.sparse_attention_section(load_config(config))}
    mode = section.pop("mode")
    kind = next(kind for kind in _CLASSES if kind._mode == mode)
    names = kind._fields if kind is LocalSlidingWindowSparsityConfig else (*_COMMON, *kind._fields)
    names = names if "block" in names else ("block", *names)
    return kind(num_heads, **{name: section[name] for name in names})
