# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model that was built under zero.Init and moved to a device is whole nowhere: not even in initialize."""

import models
import torch
import torch.distributed as dist
from accelerated import DEVICE, begin
from conftest import run_processes
from torch import nn

import deeptide

WIDTH = 256
NUMEL = 8 * WIDTH * WIDTH


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))


def move_deferred():
    controls = begin()
    config = models.config(3, bf16=True, zero={"stage3_max_live_parameters": WIDTH * WIDTH})
    del config["optimizer"]
    torch.manual_seed(1)
    expected = [layer.weight.detach().bfloat16() for layer in Layers().layers]
    torch.manual_seed(1)
    with deeptide.zero.Init():
        model = Layers()
    before = controls.used_bytes()
    model.to(DEVICE)
    assert all(p.device.type == DEVICE for p in model.parameters())
    assert controls.used_bytes() - before < 0.05 * 4 * NUMEL
    torch.accelerator.reset_peak_memory_stats()
    engine = deeptide.initialize(model=model, config=config)[0]
    peak = torch.accelerator.max_memory_allocated() - before
    assert peak < 0.5 * 4 * NUMEL, (peak, 4 * NUMEL)
    got = engine.module_state_dict()
    for i, weight in enumerate(expected):
        assert torch.equal(got[f"layers.{i}.weight"].cpu(), weight), i
    engine.destroy()
    dist.destroy_process_group()


def test_a_model_without_memory_moves_to_the_device_without_it():
    run_processes(2, move_deferred, preload=("torch._dynamo",))
