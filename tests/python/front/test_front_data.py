# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The data loader: each rank its part, positions that restore, epochs that differ."""

import json
import os
import random

import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide.data import DataLoader, RepeatingLoader


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def numbers(batches):
    return [batch.tolist() for batch in batches]


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_an_epoch_without_overlap(world_size):
    def epoch(world):
        loader = DataLoader(Numbers(48), batch_size=2, world=world, seed=5)
        batches = numbers(loader)
        assert len(batches) == len(loader) == 48 // (2 * world_size)
        return batches

    parts = run_ranks(world_size, epoch)
    assert sorted(flat(flat(parts))) == list(range(48))


@pytest.mark.parametrize(("drop_last", "expected"), [(True, 2), (False, 3)])
def test_the_last_samples_are_dropped_or_filled_up_as_told(drop_last, expected):
    def epoch(world):
        return numbers(DataLoader(Numbers(11), batch_size=2, world=world, drop_last=drop_last))

    parts = run_ranks(2, epoch)
    assert [len(part) for part in parts] == [expected] * 2
    seen = flat(flat(parts))
    assert len(set(seen)) == (8 if drop_last else 11)
    assert all(len(batch) == 2 for part in parts for batch in part)


def test_a_rank_alone_takes_a_short_last_batch():
    loader = DataLoader(Numbers(11), batch_size=4, drop_last=False)
    batches = numbers(loader)
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert sorted(flat(batches)) == list(range(11))


def test_each_epoch_has_its_own_order_and_the_seed_repeats_it():
    loader = DataLoader(Numbers(64), batch_size=4, seed=1)
    first, second = numbers(loader), numbers(loader)
    assert first != second and sorted(flat(first)) == sorted(flat(second))
    again = DataLoader(Numbers(64), batch_size=4, seed=1)
    assert numbers(again) == first and numbers(again) == second
    assert numbers(DataLoader(Numbers(64), batch_size=4, seed=2)) != first


def test_without_shuffle_the_order_is_the_datasets():
    assert flat(numbers(DataLoader(Numbers(6), batch_size=2, shuffle=False))) == list(range(6))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_restored_moves_the_iteration_under_way(workers):
    loader = DataLoader(Numbers(40), batch_size=4, seed=3, num_workers=workers)
    whole, next_epoch = numbers(loader), numbers(loader)
    other = DataLoader(Numbers(40), batch_size=4, seed=3, num_workers=workers)
    seen, saved = [], None
    for batch in other:
        seen.append(batch.tolist())
        if len(seen) == 3:
            saved = other.state_dict()
        if len(seen) == 6:
            other.load_state_dict(saved)
    assert seen == whole[:6] + whole[3:]
    assert other.position() == (0, 10)
    assert numbers(other) == next_epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_was_given_and_not_what_was_fetched(workers):
    loader = DataLoader(Numbers(40), batch_size=4, seed=3, num_workers=workers)
    whole = numbers(loader)
    other = DataLoader(Numbers(40), batch_size=4, seed=3, num_workers=workers)
    iterator = iter(other)
    for _ in range(3):
        next(iterator)
    assert other.position() == (0, 3)
    resumed = DataLoader(Numbers(40), batch_size=4, seed=3, num_workers=workers)
    resumed.load_state_dict(other.state_dict())
    assert numbers(resumed) == whole[3:]
    assert numbers(resumed) == numbers(loader), "the epoch after is whole again"


def test_a_position_at_an_epochs_end_goes_on_with_the_next():
    loader = DataLoader(Numbers(8), batch_size=4)
    numbers(loader)
    resumed = DataLoader(Numbers(8), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == numbers(loader)


def test_a_break_leaves_the_epoch():
    loader = DataLoader(Numbers(16), batch_size=4, seed=9)
    reference = DataLoader(Numbers(16), batch_size=4, seed=9)
    next(iter(loader))
    numbers(reference)
    assert numbers(loader) == numbers(reference)


def test_a_position_holds_for_another_number_of_ranks():
    def two(world):
        loader = DataLoader(Numbers(32), batch_size=2, world=world, seed=4)
        iterator = iter(loader)
        given = [next(iterator).tolist() for _ in range(3)]
        return given, loader.state_dict()

    parts = run_ranks(2, two)
    alone = DataLoader(Numbers(32), batch_size=2, seed=4)
    alone.load_state_dict(parts[0][1])
    rest = flat(numbers(alone))
    assert sorted(rest + flat(flat([given for given, _ in parts]))) == list(range(32))


def test_a_position_of_another_dataset_is_refused():
    loader = DataLoader(Numbers(32), batch_size=2)
    with pytest.raises(deeptide.ConfigError, match="num_samples 32, this loader has 16"):
        DataLoader(Numbers(16), batch_size=2).load_state_dict(loader.state_dict())


def test_iterating_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    numbers(DataLoader(Numbers(16), batch_size=4))
    assert torch.equal(torch.get_rng_state(), before)


class Draws(Numbers):
    """Draws for each sample, like augmentation: torch's numbers and Python's."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(2**40, ()), random.getrandbits(40)])


def draw_in_workers(folder):
    deeptide.init_distributed()
    engine, _, _, _ = deeptide.initialize(
        model=torch.nn.Linear(2, 1),
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}},
    )
    epochs = []
    for _ in range(2):
        # Anew: the numbers follow from seed, epoch and sample, not from what this process drew before.
        loader = DataLoader(Draws(16), batch_size=2, world=engine.world, seed=3, num_workers=2)
        epochs.append([[batch.tolist() for batch in loader] for _ in range(2)])
    with open(os.path.join(folder, str(engine.global_rank)), "w") as file:
        json.dump(epochs, file)


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch(tmp_path):
    run_processes(2, draw_in_workers, str(tmp_path))
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for first, again in ranks:
        assert first == again
    for kind in (1, 2):
        # 2 ranks x 2 epochs x 8 samples.
        assert len({sample[kind] for epochs, _ in ranks for sample in flat(flat(epochs))}) == 32
    alone = DataLoader(Numbers(16), batch_size=2, seed=3)
    for epoch in range(2):
        batches = zip(*(epochs[epoch] for epochs, _ in ranks), strict=True)
        order = [sample[0] for of_ranks in batches for sample in flat(of_ranks)]
        assert order == flat(numbers(alone)), "the order is that of any world"


class Fetches(Draws):
    """Fetches a batch at once, like some datasets."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def draws_of(loader):
    return {int(sample[0]): sample[1:].tolist() for batch in loader for sample in batch}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Draws, Fetches])
def test_a_run_that_resumes_within_an_epoch_draws_what_it_would_have_drawn(kind, persistent):
    def make(workers, world=None):
        more = {"persistent_workers": persistent, "num_workers": workers}
        return DataLoader(kind(24), batch_size=2, seed=3, world=world, **more)

    loader = make(2)
    first, second = draws_of(loader), draws_of(loader)
    assert first.keys() == second.keys()
    assert not {tuple(draw) for draw in first.values()} & {tuple(draw) for draw in second.values()}
    begun = make(2)
    iterator = iter(begun)
    given = {}
    for _ in range(5):
        given.update({int(sample[0]): sample[1:].tolist() for sample in next(iterator)})
    resumed = make(1)
    resumed.load_state_dict(begun.state_dict())
    assert {**given, **draws_of(resumed)} == first
    assert draws_of(resumed) == second


def test_collate_fn_makes_the_batches():
    loader = DataLoader(Numbers(4), batch_size=2, shuffle=False, collate_fn=lambda samples: tuple(samples))
    assert list(loader) == [(0, 1), (2, 3)]


def test_an_iterable_dataset_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(deeptide.ConfigError, match="Stream has no length"):
        DataLoader(Stream(), batch_size=1)


@pytest.mark.parametrize(("count", "batch"), [(0, 2), (4, 0)])
def test_sizes_that_are_not_positive_are_refused(count, batch):
    with pytest.raises(ValueError, match="is 0, expected at least 1"):
        DataLoader(Numbers(count), batch_size=batch)


def test_repeating_loader_begins_again():
    loader = RepeatingLoader(DataLoader(Numbers(4), batch_size=2))
    given = flat(next(loader).tolist() for _ in range(6))
    assert all(sorted(given[begin : begin + 4]) == [0, 1, 2, 3] for begin in (0, 4, 8))


def test_initialize_makes_the_loader_of_micro_batches():
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}, "dataloader_drop_last": True}
    data = torch.utils.data.TensorDataset(torch.ones(10, 4))
    _, _, loader, _ = deeptide.initialize(model=torch.nn.Linear(4, 1), config=config, training_data=data)
    assert [batch[0].shape for batch in loader] == [(3, 4)] * 3


def test_a_collate_fn_without_data_is_refused():
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}}
    with pytest.raises(deeptide.ConfigError, match="collate_fn was given without training_data"):
        deeptide.initialize(model=torch.nn.Linear(4, 1), config=config, collate_fn=list)
