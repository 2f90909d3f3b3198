# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The loader under DeepSpeed's name gives samples in DeepSpeed's order, and a run goes on within it."""

import models
import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface
from torch.utils.data import DistributedSampler, SequentialSampler

import deeptide

COUNT = 11  # of two ranks and batches of two: padded, and the last batch is short


def expected(rank, world=2, batch=2):
    """DeepSpeed's order: torch's sampler, which nobody tells the epoch."""
    indices = list(DistributedSampler(range(COUNT), world, rank))
    return [indices[i : i + batch] for i in range(0, len(indices), batch)]


def read(loader):
    return [batch.tolist() for batch in loader]


def check_order(folder):
    deepspeed = interface()
    data = torch.arange(COUNT)
    config = {**models.config(0), "train_micro_batch_size_per_gpu": 2, "seed": 17}
    config.pop("train_batch_size", None), config.pop("gradient_accumulation_steps", None)
    engine, _, loader, _ = deepspeed.initialize(model=models.make_model(), config=config, training_data=data)
    rank = engine.global_rank
    assert read(loader) == expected(rank) and read(loader) == expected(rank)
    assert len(loader) == 3 and [len(batch) for batch in expected(rank)] == [2, 2, 2]
    assert read(engine.deepspeed_io(data, batch_size=4)) == expected(rank, batch=4)
    assert read(engine.deepspeed_io(data, 5, route="eval"))[0] == list(range(rank, COUNT, 2))[:5]

    rest = iter(loader)
    next(rest)
    engine.save_checkpoint(folder)
    following = [batch.tolist() for batch in rest]
    engine.load_checkpoint(folder)
    assert read(loader) == following == expected(rank)[1:]

    own = deepspeed.runtime.dataloader.DeepSpeedDataLoader(data, 2, False, 0, None)
    assert read(own) == expected(rank) and own.len == 3
    given = deepspeed.DeepSpeedDataLoader(data, 4, False, 0, None, data_sampler=SequentialSampler(data))
    assert read(given) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    last = deepspeed.DeepSpeedDataLoader(data, 4, False, 0, None, dataloader_drop_last=True)
    assert read(last) == expected(rank, batch=4)[:1]

    with pytest.raises(deeptide.ConfigError, match="under Deeptide's name, whose order of samples"):
        loader.load_state_dict(deeptide.DataLoader(data, 2, world=engine.world).state_dict())


def test_samples_come_in_deepspeeds_order_in_each_epoch(tmp_path):
    run_processes(2, check_order, str(tmp_path))
