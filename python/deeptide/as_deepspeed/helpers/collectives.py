# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Collectives over several tensors at once, which DeepSpeed adds to torch's."""

from __future__ import annotations

import torch
import torch.distributed as dist


def reduce_scatter_coalesced(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """The mean over the ranks of each tensor's part that belongs to this rank. Collective, one for all tensors.

    Shapes: (N,) in all -> (n,) each, where n = ceil(N / ranks) but for what the last ranks lack. One dtype.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    rows = torch.cat([_padded(tensor, size * ranks).view(ranks, size) for tensor, size in zip(tensors, sizes)], dim=1)
    own = torch.empty_like(rows[0])
    dist.reduce_scatter_tensor(own, rows.div_(ranks).reshape(-1), group=group)
    lengths = [max(0, min(size, t.numel() - rank * size)) for t, size in zip(tensors, sizes)]
    return [part[:length] for part, length in zip(own.split(sizes), lengths)]


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


class _Works:
    """Several collectives that are under way, as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all are done."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> _Works | None:
    """all_gather_into_tensor of each pair. Collective. With `async_op` returns what wait() ends."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = _Works([dist.all_gather_into_tensor(out, own, group, True) for out, own in pairs])
    if async_op:
        return works
    works.wait()
    return None
