# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.dataloader: the engine's loader in DeepSpeed's order of samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from deeptide._C import ConfigError
from deeptide.data import DataLoader


class _Batches:
    """A rank's batches from a sampler of torch's. Every epoch is alike where the sampler draws alike."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self._batches = BatchSampler(sampler, batch_size, drop_last)
        self._rest: Iterator[list[int]] = iter(())

    def batches_per_epoch(self) -> int:
        return len(self._batches)

    def set_position(self, epoch: int, batch: int) -> None:
        self._rest = itertools.islice(iter(self._batches), batch, None)

    def next(self) -> list[int]:
        return next(self._rest, [])


class OrderedLoader(DataLoader):
    """This rank's micro-batches in DeepSpeed's order, from seed 0: the same in each epoch, the last one may be short.

    DeepSpeed leaves the order to torch's DistributedSampler, and never tells it the epoch.
    """

    _order = "deepspeed"

    def _make_sampler(
        self, batch_size: int, rank: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
    ) -> Any:
        samples: Any = range(self._num_samples)
        order: Any = DistributedSampler(samples, world_size, rank, shuffle)
        return _Batches(order, batch_size, drop_last)


class DeepSpeedDataLoader(OrderedLoader):
    """DeepSpeed's class, for programs that make one themselves; `engine.deepspeed_io` gives the engine's."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
    ) -> None:
        if deepspeed_dataloader_config:
            raise ConfigError(
                "DeepSpeedDataLoader: got deepspeed_dataloader_config, which asks for a curriculum; give the data to "
                "deepspeed.initialize(training_data=…) with the section data_efficiency"
            )
        self._given_sampler = data_sampler
        self._ranks = data_parallel_rank, data_parallel_world_size
        self.data_sampler, self.collate_fn, self.tput_timer = data_sampler, collate_fn, tput_timer
        self.post_process_func: Callable[..., Any] | None = None
        options: dict[str, Any] = {"pin_memory": pin_memory and torch.cuda.is_available()}
        if num_local_io_workers:
            options["num_workers"] = num_local_io_workers
        super().__init__(dataset, batch_size, collate_fn, dataloader_drop_last, **options)

    def _make_sampler(
        self, batch_size: int, rank: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
    ) -> Any:
        if self._given_sampler is not None:
            return _Batches(self._given_sampler, batch_size, drop_last)
        number, count = self._ranks
        is_group = dist.is_available() and dist.is_initialized()
        rank = (dist.get_rank() if is_group else 0) if number is None else number
        count = (dist.get_world_size() if is_group else 1) if count is None else count
        self._world_batch = batch_size * count
        return super()._make_sampler(batch_size, rank, count, shuffle, drop_last, seed)

    @property
    def len(self) -> int:
        """Batches of an epoch."""
        return len(self)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.tput_timer is not None:
                self.tput_timer.start()
            yield batch if self.post_process_func is None else self.post_process_func(batch, self.data_sampler)
