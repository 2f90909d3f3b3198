# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of mixed lengths in rows of one length, where each attends to itself alone: no row is mostly padding.

Shapes: R rows of L tokens; a row holds several sequences one after another, then padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deeptide import _C
from deeptide._C import ConfigError

IGNORED = -100  # the label of a token that no loss counts


def pack_lengths(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of sequences by row: the longest first, each into the fullest row with room. Rows by first index.

    The same for the same lengths. Errors: ConfigError for a length that no row holds.
    """
    return _C.pack_lengths([int(length) for length in lengths], row_length)


def block_diagonal_mask(sequence_ids: Tensor, causal: bool = False, dtype: torch.dtype = torch.bool) -> Tensor:
    """Which tokens attend to which: (R, L) -> (R, 1, L, L), query before key.

    `sequence_ids`: equal within a sequence, negative for padding, which attends to itself, so that no row of the mask
    is empty. bool: True where a token attends. A floating type: 0 there, its lowest value elsewhere, to be added.
    """
    same = sequence_ids.unsqueeze(-1) == sequence_ids.unsqueeze(-2)
    length = sequence_ids.size(-1)
    if causal:
        same = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    same = same.unsqueeze(1)
    if dtype == torch.bool:
        return same
    return torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill(~same, torch.finfo(dtype).min)


class PackedDataset(Dataset[Any]):
    """A dataset of rows: an item is the list of the samples that share one. `lengths`: the tokens of each sample."""

    def __init__(self, dataset: Any, lengths: Sequence[int], row_length: int) -> None:
        if len(lengths) != len(dataset):
            raise ConfigError(
                f"PackedDataset: got {len(lengths)} lengths for {len(dataset)} samples; give one for each"
            )
        self._dataset = dataset
        self.rows = pack_lengths(lengths, row_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Any]:
        return [self._dataset[sample] for sample in self.rows[index]]


class PackingCollator:
    """Makes a batch of rows: the collate_fn for a PackedDataset.

    A sample is a dict of tensors or lists over its tokens, "input_ids" among them. The batch has each of them, padded
    by `pad_token_id` ("labels": by -100, others: by 0), and
    "position_ids" (R, L): from 0 in each sequence;
    "sequence_ids" (R, L): 0, 1, … in a row, -1 for padding;
    "attention_mask" (R, 1, L, L): block_diagonal_mask of them, unless mask_dtype is None.
    The default is a mask that is added to scores, as Transformers' "eager", "sdpa" and "flex_attention" all read it:
    "eager" adds a bool one as 0 and 1, which masks nothing. "flash_attention_2" reads none: give None, and it tells
    sequences apart by "position_ids".
    With `causal`, the mask is, and a sequence's first label is -100: the token before it belongs to another sequence.
    """

    def __init__(
        self,
        row_length: int,
        pad_token_id: int = 0,
        causal: bool = False,
        mask_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self._length = row_length
        self._pad = {"input_ids": pad_token_id, "labels": IGNORED}
        self._causal = causal
        self._mask_dtype = mask_dtype

    def __call__(self, rows: list[list[dict[str, Any]]]) -> dict[str, Tensor]:
        """The batch of these rows. Errors: ConfigError for samples that do not fit a row or each other."""
        batch: dict[str, Tensor] = {}
        for name in rows[0][0]:
            values = [[torch.as_tensor(self._field(sample, name)) for sample in row] for row in rows]
            if name == "labels" and self._causal:
                values = [[torch.cat([part.new_full((1,), IGNORED), part[1:]]) for part in row] for row in values]
            batch[name] = torch.stack([self._filled(row, self._pad.get(name, 0)) for row in values])
        counts = [[len(sample["input_ids"]) for sample in row] for row in rows]
        positions = [[torch.arange(count) for count in row] for row in counts]
        numbers = [[torch.full((count,), number) for number, count in enumerate(row)] for row in counts]
        batch["position_ids"] = torch.stack([self._filled(row, 0) for row in positions])
        batch["sequence_ids"] = torch.stack([self._filled(row, -1) for row in numbers])
        if self._mask_dtype is not None:
            batch["attention_mask"] = block_diagonal_mask(batch["sequence_ids"], self._causal, self._mask_dtype)
        return batch

    @staticmethod
    def _field(sample: dict[str, Any], name: str) -> Any:
        if name not in sample or len(sample[name]) != len(sample["input_ids"]):
            raise ConfigError(f"PackingCollator: a sample has no {name!r} for each of its input_ids; give all the same")
        return sample[name]

    def _filled(self, parts: list[Tensor], fill: int) -> Tensor:
        row = torch.cat(parts)
        if row.size(0) > self._length:
            raise ConfigError(
                f"PackingCollator: a row has {row.size(0)} tokens, more than row_length, {self._length}; give it the "
                "length of the PackedDataset"
            )
        return torch.cat([row, row.new_full((self._length - row.size(0), *row.shape[1:]), fill)])
