# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Data loading: each rank its part of a dataset, in an order that two integers restore."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.data

from deeptide._C import ConfigError, DistributedSampler, World


class _Batches:
    """The rest of the sampler's epoch, as torch's DataLoader wants a batch sampler."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while indices := self._sampler.next():
            yield indices

    def __len__(self) -> int:
        return self._sampler.batches_per_epoch()


class _SeededBatches(_Batches):
    """Likewise for _Seeded: (index, seed) each."""

    def __init__(self, sampler: DistributedSampler, seed_of: Callable[[int], int]) -> None:
        super().__init__(sampler)
        self._seed_of = seed_of

    def __iter__(self) -> Iterator[Any]:
        for indices in super().__iter__():
            yield [(index, self._seed_of(index)) for index in indices]


class _Seeded(torch.utils.data.Dataset[Any]):
    """A dataset for workers, whose random numbers follow the sample.

    torch gives a worker a stream per epoch: a run that resumes within one, or with other workers, would draw others.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, item: tuple[int, int]) -> Any:
        index, seed = item
        _seed_generators(seed)
        return self._dataset[index]


class _SeededFetches(_Seeded):
    """A dataset that fetches several samples at once: their numbers follow the first of them."""

    def __getitems__(self, items: list[tuple[int, int]]) -> Any:
        _seed_generators(items[0][1])
        return self._dataset.__getitems__([index for index, _ in items])


def _count(dataset: object) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"training_data: {type(dataset).__name__} has no length; iterable datasets are not supported yet. "
            "Give a dataset with __len__ and __getitem__, or iterate over a loader of your own"
        )
    return len(dataset)


def _mixed(*numbers: int) -> int:
    """63 bits in which every number matters; unlike a hash of Python, the same in every process (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E37_79B9_7F4A_7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58_476D_1CE4_E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D0_49BB_1331_11EB % 2**64
        state ^= state >> 31
    return state >> 1


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


class DataLoader:
    """This rank's micro-batches of `dataset`. Iterating again starts the next epoch, in another order.

    A break leaves the epoch; `load_state_dict` goes on in its middle. Further keywords go to torch's DataLoader. In
    workers, torch's, Python's and NumPy's generators are seeded for each sample, from `seed`, the epoch and its index:
    it is augmented alike after a resume, and by any number of workers and ranks.
    """

    _order = ""  # a name of the order of samples, where a subclass has another

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        world: World | None = None,
        shuffle: bool = True,
        **torch_options: Any,
    ) -> None:
        rank, world_size = (0, 1) if world is None else (world.rank, world.size)
        self._num_samples = _count(dataset)
        self._world_batch = batch_size * world_size
        self._sampler = self._make_sampler(batch_size, rank, world_size, shuffle, drop_last, seed)
        self._seed, self._rank = seed, rank
        # Without a generator of its own, torch's loader draws from the global one at each epoch: no exact resume.
        self._generator = torch.Generator()
        batches, fetched = _Batches(self._sampler), dataset
        if torch_options.get("num_workers", 0) > 0:
            batches = _SeededBatches(self._sampler, lambda index: _mixed(self._seed, self._epoch, index))
            fetched = (_SeededFetches if getattr(dataset, "__getitems__", None) else _Seeded)(dataset)
        self._torch_loader = torch.utils.data.DataLoader(
            fetched,
            batch_sampler=batches,
            collate_fn=collate_fn,
            generator=self._generator,
            **torch_options,
        )
        self.dataset = dataset
        self.batch_size = batch_size
        self._epoch, self._batch = 0, 0
        self._begun = False  # an iteration has begun since the position was set

    def _make_sampler(
        self, batch_size: int, rank: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
    ) -> DistributedSampler:
        return DistributedSampler(
            self._num_samples,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
        )

    def __len__(self) -> int:
        return self._sampler.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        if self._batch >= len(self) or (self._begun and self._batch > 0):
            self._epoch, self._batch = self._epoch + 1, 0
        self._begun = True
        self._sampler.set_position(self._epoch, self._batch)
        self._generator.manual_seed(_mixed(self._seed, self._epoch, self._rank))
        for batch in self._torch_loader:
            # Counted here and not by the sampler, which runs ahead when workers fetch.
            self._batch += 1
            yield batch
            if not self._begun:  # the position was set meanwhile
                break
        else:
            return
        if self._batch < len(self):
            yield from self

    def position(self) -> tuple[int, int]:
        """(epoch, batches of it already given)."""
        return self._epoch, self._batch

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Sets where the next iteration begins. One that is under way goes on from there, to the end of that epoch."""
        self._epoch, self._batch, self._begun = epoch, batch, False

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Any]:
        """The position, now or an earlier one, in samples of the whole world: it holds for other numbers of ranks."""
        epoch, batch = position or self.position()
        return {
            "epoch": epoch,
            "samples": batch * self._world_batch,
            "num_samples": self._num_samples,
            "seed": self._seed,
            **({"order": self._order} if self._order else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Errors: ConfigError when the saved position is of another dataset or order."""
        if "curriculum" in state:
            raise ConfigError(
                "the checkpoint's data position is of a curriculum; keep the section "
                "data_efficiency.data_sampling.curriculum_learning of the saved run, or load without training_data"
            )
        if state.get("order", "") != self._order:
            other = "Deeptide" if self._order else "DeepSpeed"
            raise ConfigError(
                f"the checkpoint's data position is of a run under {other}'s name, whose order of samples is another "
                "one; go on under that name, or load without training_data"
            )
        for key, mine in (("num_samples", self._num_samples), ("seed", self._seed)):
            if state[key] != mine:
                raise ConfigError(
                    f"the checkpoint's data position is for {key} {state[key]}, this loader has {mine}; "
                    "give the dataset and seed of the saved run, or load without training_data"
                )
        self.set_position(state["epoch"], state["samples"] // self._world_batch)


class RepeatingLoader:
    """A loader without end: when it runs out, it begins again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
