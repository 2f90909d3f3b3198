# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.zero.utils: the error that scripts catch, and comparisons between ranks."""

from __future__ import annotations

import torch.distributed as dist


class ZeRORuntimeException(Exception):  # noqa: N818
    """DeepSpeed's error of ZeRO. The engine's own are ConfigError, CheckpointError and CommError."""


def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
    """Collective. Errors: RuntimeError if rank 0 has others."""
    if not dist.is_initialized():
        return
    first: list[list[int]] = [list(ints)]
    dist.broadcast_object_list(first, src=0)
    if first[0] != list(ints):
        raise RuntimeError(f"rank {dist.get_rank()} has {list(ints)}, rank 0 has {first[0]}")


def assert_lst_len_same_as_other_ranks(lst: list[int]) -> None:
    """Collective. Errors: RuntimeError if rank 0's list has another length."""
    assert_ints_same_as_other_ranks([len(lst)])
