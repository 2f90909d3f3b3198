# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Batches by length train with rates that follow their sizes; DeepSpeed's classes hold the state that programs read."""

import models
import pytest
import torch
from torch import nn

import deeptide
from deeptide.as_deepspeed.training import data_pipeline
from deeptide.efficiency import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    VariableBatchSizeLR,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)

LENGTHS = [5, 3, 9, 2, 2, 2, 7, 4, 4, 1, 6, 3, 2, 8, 1, 5]


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, i):
        return torch.full((LENGTHS[i],), float(i))


def pad(sample, length):
    return nn.functional.pad(sample, (0, length - len(sample)), value=-1.0)


def collate(samples):
    return torch.stack([sample.sum() for sample in samples]).unsqueeze(1)


def test_rates_are_the_schedules_own_times_the_batchs_factor():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    schedule = VariableBatchSizeLR(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), 4, [4, 8, 2], None, "linear")
    rates = []
    for _ in range(7):
        rates += schedule.get_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.8, 1.6, 0.2, 0.4, 0.4, 0.1, 0.1])
    again = VariableBatchSizeLR(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), 4, [1], None, "linear")
    again.load_state_dict(schedule.state_dict())
    assert (again.get_lr(), again.get_last_lr()) == (schedule.get_lr(), schedule.get_last_lr())


def test_micro_batches_are_padded_to_the_longest_of_their_batch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    loader, schedule, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        Sentences(),
        LENGTHS,
        max_tokens=10,
        effective_batch_size=2,
        sequence_picking_order="seqlen",
        required_microbatches_of_same_seqlen=True,
        sample_padding_fn=pad,
        dataloader_collate_fn=torch.stack,
        lr_scheduler_or_optimizer=optimizer,
    )
    shapes = [tuple(batch.shape) for batch in loader]
    sizes = schedule.batch_sizes
    assert [shapes[i][0] + shapes[i + 1][0] for i in range(0, len(shapes), 2)] == sizes
    assert all(shapes[i][1] == shapes[i + 1][1] for i in range(0, len(shapes), 2))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * sizes[0] / 2)
    assert arguments["dataset"] is loader.dataset


def test_an_engine_trains_with_the_lengths_that_the_analyzer_wrote(tmp_path):
    section = {
        "enabled": True,
        "max_tokens": 12,
        "metrics_path": str(tmp_path / "metrics"),
        "lr_scaling_method": "sqrt",
    }
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": section}}

    def start():
        config = models.config(0, micro=1, data_efficiency=efficiency)
        model = nn.Linear(1, 1)
        engine = deeptide.initialize(model=model, config=config)[0]
        loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
            Sentences(),
            engine,
            dataloader_collate_fn=collate,
            batch_seqlens_fn=lambda batch: torch.tensor([LENGTHS[i] for i in range(len(batch))]),
        )
        engine.lr_scheduler = schedule
        return engine, loader, schedule

    engine, loader, schedule = start()
    assert MMapIndexedDataset(f"{tmp_path}/metrics/seqlen/seqlen_sample_to_metric").sizes.tolist() == [1] * 16
    batches = list(loader)
    assert [len(batch) for batch in batches] == schedule.batch_sizes
    rates = []
    for batch in batches[:3]:
        rates += engine.get_lr()
        engine.backward(engine(batch).square().mean())
        engine.step()
    assert rates == pytest.approx([1e-2 * size**0.5 for size in schedule.batch_sizes[:3]])
    engine.save_checkpoint(tmp_path / "saved")
    again, _, resumed = start()
    again.load_checkpoint(tmp_path / "saved")
    assert (resumed.last_epoch, again.get_lr()) == (3, engine.get_lr())


def test_deepspeeds_classes_hold_their_state():
    section = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "custom"}
    scheduler = data_pipeline.CurriculumScheduler(section)
    scheduler.set_custom_get_difficulty(lambda step: 8 * step)
    assert scheduler.update_difficulty(3) == scheduler.get_current_difficulty() == 24
    assert scheduler.get_state() == {**section, "current_difficulty": 24}
    scheduler.set_state({"current_difficulty": 64})
    assert scheduler.update_difficulty(1) == 64

    drop = data_pipeline.ProgressiveLayerDrop(0.5, 1.0)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    drop.update_state(0)
    assert drop.get_theta() == 1.0
    filled = data_pipeline.get_data_efficiency_config({"data_efficiency": {"enabled": True}})
    assert filled["seed"] == 1234 and filled["data_sampling"]["num_epochs"] == 1000


def test_random_ltd_scheduler_resumes():
    config = {
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "global_batch_size": 2,
        "random_ltd_schedule": {
            "min_value": 2,
            "max_value": 8,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 6, "seq_per_step": 1},
        },
    }
    one, other = data_pipeline.RandomLTDScheduler(config), data_pipeline.RandomLTDScheduler(config)
    for step in range(4):
        one.update_seq(step)
    other.load_state_dict(one.state_dict())
    one.update_seq(4)
    other.update_seq(4)
    assert one.state_dict() == other.state_dict()
    assert one.get_current_seq() == one.get_value(4) == 6
    one.reset_to_init()
    assert one.state_dict()["consumed_layer_tokens"] == 0


def test_index_files_refuse_what_they_cannot_hold(tmp_path):
    builder = MMapIndexedDatasetBuilder(f"{tmp_path}/rows.bin", torch.uint8)
    with pytest.raises(deeptide.ConfigError, match="do not fit into uint8"):
        builder.add_item(torch.tensor([256]))
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item(torch.tensor([4]))
    with pytest.raises(deeptide.ConfigError, match="beside the data"):
        builder.finalize(f"{tmp_path}/other.idx")
    builder.finalize(f"{tmp_path}/rows.idx")
    rows = MMapIndexedDataset(f"{tmp_path}/rows")
    assert [row.tolist() for row in rows[0:2]] == [[1, 2, 3], [4]]
    assert rows.get(0, offset=1, length=1).tolist() == [2] and rows[-1].tolist() == [4]
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]
    with pytest.raises(deeptide.ConfigError, match="no type of its rows"):
        MMapIndexedDatasetBuilder(f"{tmp_path}/rows.bin", torch.float32)
