# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules, samplers, index files and batches are those that DeepSpeed 0.19.8 gave for the same settings."""

import hashlib
import json
from pathlib import Path

import numpy
import pytest
import torch

import deeptide
from deeptide import _C
from deeptide.efficiency import DataAnalyzer, MMapIndexedDataset, batch_by_seqlens, scale_lr
from deeptide.efficiency.loader import DeepSpeedDataSampler

THEIRS = json.loads((Path(__file__).parent / "deepspeed_0_19_8.json").read_text())
N = 211


class Samples(torch.utils.data.Dataset):
    """The samples from which the recorded files were computed."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([(i * 37) % 101, (i * i) % 13, i])


def analyzer(folder, worker=0):
    return DataAnalyzer(
        Samples(),
        num_workers=2,
        worker_id=worker,
        num_threads=3,
        num_threads_reduce=2,
        batch_size=7,
        metric_names=["len", "rare", "sum"],
        metric_functions=[lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b.sum(0)],
        metric_types=["single_value_per_sample"] * 2 + ["accumulate_value_over_samples"],
        metric_dtypes=[torch.int64] * 3,
        save_path=folder,
    )


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyzed")
    for worker in range(2):
        analyzer(folder, worker).run_map()
    analyzer(folder).run_reduce()
    return folder


@pytest.mark.parametrize("case", THEIRS["schedules"], ids=lambda case: case["config"]["schedule_type"])
def test_curriculum_schedules_give_their_difficulties(case):
    schedule = _C.CurriculumSchedule.from_text(json.dumps(case["config"]))
    assert [schedule.update(step) for step in range(1, 121)] == case["values"]


@pytest.mark.parametrize("case", THEIRS["random_ltd"])
def test_random_ltd_keeps_and_counts_their_tokens(case):
    section = dict(case["config"])
    batch = section.pop("global_batch_size")
    layers = list(range(section["random_ltd_layer_num"]))
    section |= {"enabled": True, "random_ltd_layer_id": layers, "model_type": "decoder"}
    section["hidden_state_order"] = "batch_seq_dim"
    config = deeptide.config.load_config(
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}
    )
    schedule = _C.RandomLtdSchedule.from_config(config, batch)
    assert schedule.layer_tokens_after(40) == case["total"]
    found = []
    for step in range(70):
        schedule.update(step)
        schedule.update(step)  # the micro-batches of a step count once
        found.append([schedule.position[1], schedule.position[2]])
    assert found == case["values"]


def test_analyzer_writes_their_files(analyzed):
    for name, expected in THEIRS["analyzer"].items():
        path = analyzed / name.split("_")[0] / name
        if name.endswith(".bin"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == expected, name
        else:
            rows = MMapIndexedDataset(str(path)[: -len(".idx")])
            assert [numpy.dtype(rows.dtype).name, rows.sizes.tolist()] == expected, name


def section_of(case, folder):
    metrics = json.loads(json.dumps(case["metrics"]).replace("ROOT", str(folder)))
    return {
        "seed": case["seed"],
        "data_sampling": {"num_epochs": 3, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}},
    }


@pytest.mark.parametrize("case", THEIRS["samplers"], ids=lambda case: f"{case['name']}-{case['world']}")
def test_sampler_draws_their_batches(case, analyzed):
    sampler = DeepSpeedDataSampler(section_of(case, analyzed), N, 2, 0, case["world"], None, 4, 0, case["drop"])
    found = list(sampler)
    if case["drop"]:
        assert found == case["batches"]
        assert sampler.state_dict()["curriculum"]["step"] == case["step"]
    else:  # theirs also deals slices of fewer samples than ranks, with which some rank gets none
        full = [batch for batch in case["batches"] if len(batch) == 2]
        assert len(full) > 80
        assert [batch for batch in found if len(batch) == 2][: len(full)] == full


@pytest.mark.parametrize("case", THEIRS["samplers"][::4], ids=lambda case: f"{case['name']}-{case['world']}")
def test_sampler_resumes_exactly_from_every_batch(case, analyzed):
    def make():
        return DeepSpeedDataSampler(section_of(case, analyzed), N, 2, 0, case["world"], None, 4, 0, case["drop"])

    whole = list(make())
    first = make()
    for number, batch in enumerate(first):
        assert batch == whole[number]
        if number % 5 == 0:
            again = make()
            again.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert list(again) == whole[number + 1 :]


def test_ranks_share_each_batch_without_overlap(analyzed):
    case = next(c for c in THEIRS["samplers"] if c["name"] == "two" and c["world"] == 2)
    parts = [
        list(DeepSpeedDataSampler(section_of(case, analyzed), N, 2, rank, 2, None, 4, rank, True)) for rank in range(2)
    ]
    alone = list(DeepSpeedDataSampler(section_of(case, analyzed), N, 4, 0, 1, None, 4, 0, True))
    assert [a + b for a, b in zip(*parts, strict=True)] == alone


@pytest.mark.parametrize("case", THEIRS["batches"], ids=lambda case: str(sorted(case["args"])))
def test_batches_by_length_are_theirs(case):
    ids, sizes, longest = batch_by_seqlens(THEIRS["lengths"], **case["args"])
    assert [[batch, samples] for batch, samples in ids] == case["ids"]
    assert (sizes, longest) == (case["sizes"], case["longest"])


def test_rates_scale_as_theirs():
    for base, batch, method, rate in THEIRS["rates"]:
        assert scale_lr(base, batch, 0.01, method) == rate


def test_layer_drop_follows_its_formula():
    schedule = _C.LayerDropSchedule(0.5, 0.01)
    assert schedule.current == 1.0
    for step in range(0, 500, 7):
        schedule.update(step)
        assert schedule.current == (1.0 - 0.5) * float(numpy.exp(-0.01 * step)) + 0.5
    assert [schedule.keep_probability(i, 4, 0.6) for i in range(4)] == [1 - i / 4 * (1 - 0.6) for i in range(4)]
