# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.placement of optimizer states on an accelerator: its memory, the host's, and files, by sizes and shares."""

import re

import models
import pytest
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin
from test_offload_on_accelerator import Model, make_engine, train
from test_on_accelerator import check_order, far, on_host, run
from test_twin_flow_on_accelerator import BLOCK, NUMEL, split

import deeptide

MIB = 1 << 20


def placed(folder, **tiers):
    return {"placement": {"optimizer_states": tiers, "nvme_path": folder}}


def line_of(engine, own, stage, bf16):
    """Of the optimizer's states, as forecast, measured and planned."""
    line = {line.role: line for line in engine.memory()}["optimizer states"]
    assert line.measured_bytes == line.predicted_bytes, line
    assert line.measured_off_device_bytes == line.off_device_bytes, line
    planned = deeptide.plan(
        models.to_device(models.make_model(kind=Model), DEVICE),
        models.config(stage, bf16=bf16, deeptide=own),
        world_size=dist.get_world_size(),
    ).lines["optimizer states"]
    assert planned.memory_bytes == line.predicted_bytes
    assert planned.off_device_bytes == line.off_device_bytes
    return line, planned.file_bytes


def compare_with_ratio(stage, bf16, folder):
    """Three tiers have the bits of the ratio that puts as much off the device; checkpoints go there and back."""
    controls = begin()
    controls.configure("random", guard_pinned=True)
    three = placed(folder + "/blocks", device="30%", cpu="40%", nvme="rest")
    states = []
    for settings in ({"zero": split(0.7)}, {"deeptide": three}):
        engine = make_engine(DEVICE, stage, gas=2, bf16=bf16, gradient_clipping=0.01, **settings)
        train(engine, DEVICE, gas=2)
        states.append(on_host(models.everything(engine)))
        if "deeptide" in settings:
            text = engine._core.summary()
            assert re.search(r"of 3[0-9.]+ % of the elements on .* off it, .* in files of ", text), text
            _, file_bytes = line_of(engine, three, stage, bf16)
            assert file_bytes > 0
            engine.save_checkpoint(folder)
        engine.destroy()
    if ON_GPU:
        assert far(states[0].values(), states[1].values(), 2e-2) == []
    else:
        models.assert_same(*states)
    engine = make_engine(DEVICE, stage, bf16=bf16, zero=split(0.3))
    engine.load_checkpoint(folder)
    models.assert_same(states[1], on_host(models.everything(engine)))
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage", "bf16"), [(1, 2, True), (2, 0, False), (2, 1, True), (2, 3, False)])
def test_three_tiers_step_as_a_ratio_does(world, stage, bf16, tmp_path):
    run(world, compare_with_ratio, stage, bf16, str(tmp_path))


def keep_to_sizes(bf16, folder):
    controls = begin()
    item = 12 if bf16 else 8
    for own, on_device, in_memory in (
        (placed(folder, device="4MiB", cpu="5MiB", nvme="rest"), 4 * MIB, 5 * MIB),
        (placed(folder, device="4MiB", cpu="rest"), 4 * MIB, None),
        (placed(folder, device="rest", cpu="4MiB"), None, None),
        (placed(folder, cpu="rest", nvme="4MiB"), 0, None),
        (placed(folder, device="100%"), item * NUMEL, 0),
    ):
        engine = make_engine(DEVICE, 2, bf16=bf16, deeptide=own)
        train(engine, DEVICE)
        line, _ = line_of(engine, own, 2, bf16)
        if on_device is not None:
            assert on_device - 1.5 * item * BLOCK <= line.predicted_bytes <= 1.01 * on_device
        else:
            assert line.predicted_bytes == pytest.approx(item * NUMEL - 4 * MIB, abs=1.5 * item * BLOCK)
        if in_memory is not None:
            through = 12 * 4 * MIB + 8 * 4 * MIB  # files' blocks, and those that are page-locked
            assert line.off_device_bytes <= in_memory + (through if in_memory else 0)
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize("bf16", [False, True])
def test_tiers_keep_to_their_sizes(bf16, tmp_path):
    run(1, keep_to_sizes, bf16, str(tmp_path))


def refuse(config, error):
    begin()
    with pytest.raises(deeptide.ConfigError, match=error):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"deeptide": {"placement": {"gradients": {"device": "50%", "cpu": "rest"}}}},
            r"deeptide\.placement\.gradients is not supported yet on .* give the device \"100%\"",
        ),
        (
            {
                "optimizer": {"type": "Muon", "params": {"lr": 1e-2}},
                "deeptide": {"placement": {"optimizer_states": {"device": "50%", "cpu": "rest"}}},
            },
            r"deeptide\.placement\.optimizer_states off the device on .* does not go with the optimizer Muon",
        ),
    ],
)
def test_what_cannot_leave_the_device_is_named(settings, error):
    run(1, refuse, models.config(2, **settings), error)
