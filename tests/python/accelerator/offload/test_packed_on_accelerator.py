# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Packed masters on an accelerator's host: both halves lie there, the upper one being the parameter's shard."""

import re

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin, simulated_only
from test_offload_on_accelerator import OPTIMIZERS, TO_HOST, Model, make_engine, train
from test_offload_param_on_accelerator import FEW, in_files
from test_on_accelerator import check_order, far, on_host, run
from test_twin_flow_on_accelerator import split

import deeptide

pytestmark = pytest.mark.slow


def places(folder):
    return {
        "host": {**FEW, **TO_HOST, "offload_param": {"device": "cpu"}},
        "files": {**FEW, "offload_optimizer": in_files(folder), "offload_param": in_files(folder)},
    }


def train_packed(device, zero, type, packed=True):
    """With a parameter that is written on the way, and a master."""
    own = {"packed_states": packed}
    settings = {"optimizer": {"type": type, "params": OPTIMIZERS[type]}, "gradient_clipping": 0.01}
    engine = make_engine(device, 3, gas=2, bf16=True, zero=zero, deeptide=own, **settings)
    train(engine, device, gas=2)
    before = on_host(models.everything(engine))
    with torch.no_grad():
        engine.module.layers[1].weight.mul_(0.5)
    weight = engine.module.layers[0].weight
    engine._core.set_full_state("layers.0.weight", "master", torch.full(weight.shape, 0.01))
    train(engine, device, gas=2, steps=1, first=2)
    return engine, before, on_host(models.everything(engine))


def compare_with_cpu(type, folder):
    controls = begin()
    engine, before, expected = train_packed("cpu", {}, type)
    engine.destroy()
    numel = sum(p.numel() for p in Model().parameters()) // dist.get_world_size()
    for name, zero in places(folder).items():
        off = {}
        for packed in (True, False):
            controls.configure("random", max_delay_us=300, guard_pinned=True)
            engine, first, last = train_packed(DEVICE, zero, type, packed)
            if ON_GPU:
                assert far(before.values(), first.values(), 2e-2) == [], name
            else:
                models.assert_same(before, first)  # packing changes no number as long as nobody writes
                assert any(not torch.equal(last[key], value) for key, value in before.items())
            if packed and not ON_GPU:
                models.assert_same(expected, last)
            line = {line.role: line for line in engine.memory()}["optimizer states"]
            assert line.measured_bytes == line.predicted_bytes == 0, line
            assert line.measured_off_device_bytes == line.off_device_bytes, line
            own = {"packed_states": packed}
            planned = deeptide.plan(
                models.to_device(models.make_model(kind=Model), DEVICE),
                models.config(
                    3,
                    bf16=True,
                    gas=2,
                    zero=zero,
                    deeptide=own,
                    optimizer={"type": type, "params": OPTIMIZERS[type]},
                ),
                world_size=dist.get_world_size(),
            ).lines["optimizer states"]
            assert planned.off_device_bytes == line.off_device_bytes
            off[packed] = line.off_device_bytes + planned.file_bytes
            engine.destroy()
            check_order(controls)
        assert off[False] - off[True] == pytest.approx(2 * numel, rel=0.02), (name, off)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "type"), [(1, "AdamW"), (2, "AdamW"), (2, "Lamb")])
def test_the_host_steps_packed_masters_as_a_cpu_engine_does(world, type, tmp_path):
    run(world, compare_with_cpu, type, str(tmp_path))


def cross_placements(folder):
    """Packed or not, on either side: a checkpoint holds whole masters."""
    controls = begin()
    host, files = places(folder + "/blocks").values()
    before = None
    order = [("cpu", {}, True), (DEVICE, host, True), (DEVICE, host, False), (DEVICE, files, True), (DEVICE, {}, True)]
    for device, zero, packed in [*order, ("cpu", {}, False)]:
        controls.configure("random", guard_pinned=True)
        engine = make_engine(device, 3, bf16=True, zero=zero, deeptide={"packed_states": packed})
        if before:
            engine.load_checkpoint(folder)
            models.assert_same(before, on_host(models.everything(engine)))
        train(engine, device, steps=1, first=5)
        engine.save_checkpoint(folder)
        before = on_host(models.everything(engine))
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_cross_placements(world, tmp_path):
    run(world, cross_placements, str(tmp_path))


def refuse(zero):
    begin()
    config = models.config(3, bf16=True, zero=zero, deeptide={"packed_states": True})
    with pytest.raises(
        deeptide.ConfigError,
        match=re.escape("packed_states with parameters off sim:0 needs offload_optimizer with a ratio"),
    ):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


@simulated_only
@pytest.mark.parametrize("steps", [{}, split(0.5), split("auto")])
def test_packing_is_refused_where_the_device_steps(steps):
    run(1, refuse, {**steps, "offload_param": {"device": "cpu"}})
