# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Loops by hand with Accelerate, beside the same loop under DDP."""

import os

import libraries
import pytest
import torch
from conftest import run_processes
from libraries import loader, make_accelerator, train


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loop_by_hand_learns_as_under_ddp(stage, gas, tmp_path, beside_plain):
    beside_plain(libraries.run_accelerate, tmp_path, stage, 10, gas)


def check_file(folder, stage):
    """A configuration's file with "auto" values, DummyOptim and DummyScheduler; saved and loaded in the middle."""
    from accelerate.utils import DummyOptim, DummyScheduler

    path = os.path.join(folder, "ds_config.json")
    scheduler = {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    }
    config = libraries.ds_config(stage, scheduler=scheduler)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-5}}
    libraries.write_everywhere(path, config)
    accelerator = make_accelerator(stage, 1, path)
    model = libraries.make_model()
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    model, optimizer, data, scheduler = accelerator.prepare(
        model, optimizer, loader(), DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=4)
    )
    accelerator.register_for_checkpointing(counter := torch.optim.SGD([torch.zeros(1)], lr=0.5))
    first = train(accelerator, model, optimizer, scheduler, data, epochs=1)
    accelerator.save_state(os.path.join(folder, "state"))
    second = train(accelerator, model, optimizer, scheduler, data, epochs=1)
    counter.param_groups[0]["lr"] = 0.25
    accelerator.load_state(os.path.join(folder, "state"))
    assert counter.param_groups[0]["lr"] == 0.5
    assert train(accelerator, model, optimizer, scheduler, data, epochs=1) == second
    assert first[0] > second[-1]
    accelerator.save_model(model, os.path.join(folder, "model"))
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    saved = load_file(os.path.join(folder, "model", "model.safetensors"))
    for key, value in accelerator.unwrap_model(model).named_parameters():
        assert torch.equal(saved[key], value.detach()), key
    accelerator.free_memory()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_file_with_auto_values_saves_and_loads_states(stage, tmp_path):
    run_processes(2, check_file, str(tmp_path), stage)
