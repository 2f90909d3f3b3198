# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Relative paths mean the folder in which they were given, wherever the program goes afterwards."""

import json
import os
import pickle
import threading

import edges
import numpy
import pytest
import torch

from deeptide import _C
from deeptide.activations.policy import Activations
from deeptide.efficiency import indexed_dataset

MONITORS = {
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
    "checkpoint": {"folders": ["part_a", "part_b"], "on_preempt": {"folder": "preempted"}},
    "deeptide": {
        "jsonl_monitor": {"enabled": True, "output_path": "jsonl", "job_name": "job"},
        "timeline": {"enabled": True, "output_path": "timeline"},
    },
}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    return first, second


def test_paths_of_the_configuration_and_of_a_save_beside_training_follow_no_chdir(folders):
    first, second = folders
    engine = edges.start(**MONITORS)
    edges.train(engine)
    path = engine.save_checkpoint("runs", blocking=False)
    os.chdir(second)
    edges.train(engine, 2, first=1)
    assert engine.wait_for_save() in (None, path)
    engine.save_checkpoint(first / "more", blocking=True)
    engine.destroy()
    assert os.listdir(second) == []
    assert os.path.samefile(path, first / "runs" / "global_step1")
    assert {"csv", "jsonl", "timeline", "part_a", "part_b", "runs"} <= set(os.listdir(first))
    again = edges.start()
    assert again.load_checkpoint(first / "runs")[0] is not None
    again.destroy()


def test_files_of_a_policy_and_of_a_dataset_follow_no_chdir(folders):
    first, second = folders
    text = json.dumps({"activation_checkpointing": {"policy": "files", "nvme_path": "drive"}})
    section = json.loads(_C.config_section(_C.Config.from_text(text, "<test>"), "activation_checkpointing"))
    policy = Activations(section, torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
    builder = indexed_dataset.MMapIndexedDatasetBuilder("rows.bin", dtype=numpy.int32)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.end_document()
    builder.finalize("rows.idx")
    rows = indexed_dataset.MMapIndexedDataset("rows")
    os.chdir(second)
    assert policy._folders == [str(first / "drive")]
    assert pickle.loads(pickle.dumps(rows))[0].tolist() == [1, 2, 3]


def save_in_a_thread(engine, folder):
    thread = threading.Thread(target=engine.save_checkpoint, args=(folder,))
    thread.start()
    thread.join()


def test_a_save_from_a_thread_means_the_folder_of_the_call(folders):
    first, second = folders
    engine = edges.start()
    edges.train(engine)
    save_in_a_thread(engine, "runs")
    os.chdir(second)
    save_in_a_thread(engine, "runs")
    engine.destroy()
    assert (first / "runs" / "latest").exists() and (second / "runs" / "latest").exists()
