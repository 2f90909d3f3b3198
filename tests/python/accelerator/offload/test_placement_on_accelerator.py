# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.placement on an accelerator: states and gradients in its memory, the host's, and files, by sizes."""

import re

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin
from test_gradients_leave_on_accelerator import LAYERS, WIDTH
from test_gradients_leave_on_accelerator import line_of as gradients_of
from test_offload_on_accelerator import TO_HOST, Model, make_engine, results_of, train
from test_on_accelerator import check_order, far, on_host, run, unequal
from test_twin_flow_on_accelerator import BLOCK, NUMEL, split

import deeptide

MIB = 1 << 20


def placed(folder, **tiers):
    return {"placement": {"optimizer_states": tiers, "nvme_path": folder}}


def line_of(engine, own, stage, bf16):
    """Bytes of the optimizer's states, as forecast, measured and planned."""
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


@pytest.mark.costly
@pytest.mark.parametrize("bf16", [False, True])
def test_tiers_keep_to_their_sizes(bf16, tmp_path):
    run(1, keep_to_sizes, bf16, str(tmp_path))


def gradients_at(**tiers):
    return {"placement": {"gradients": tiers}}


def compare_gradients(stage, bf16, type):
    """The place of sums changes no bit of a device's steps."""
    controls = begin()
    more = {"AdamW": {"eps": 1e-5}, "Muon": {"ns_steps": 1}}.get(type, {})
    optimizer = {"type": type, "params": {"lr": 1e-2, **more}}
    settings = {"bf16": bf16, "gradient_clipping": 0.01, "optimizer": optimizer}
    controls.configure("random")
    expected = results_of(DEVICE, stage, gas=2, **settings)
    for schedule in ("late_default", "late_others", "random"):
        controls.configure(schedule, max_delay_us=300, guard_pinned=True)
        for own in (gradients_at(cpu="100%"), gradients_at(device="40%", cpu="rest")):
            got = results_of(DEVICE, stage, gas=2, deeptide=own, **settings)
            check_order(controls)
            assert unequal(expected, got) == [], (schedule, own)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16", "type"),
    [(1, 0, False, "AdamW"), (1, 2, True, "Lamb"), (2, 1, False, "Lamb"), (2, 2, True, "Muon"), (2, 3, True, "AdamW")],
)
def test_a_device_steps_gradients_of_the_host_bit_for_bit(world, stage, bf16, type):
    run(world, compare_gradients, stage, bf16, type)


def keep_gradients_to_sizes():
    controls = begin()
    numel = WIDTH * (WIDTH + 1) * LAYERS
    sums, ring, block = 4 * numel, 2 * 4 * numel // LAYERS, 4 * BLOCK
    for zero, own, on_device, off_device in (
        ({}, gradients_at(cpu="100%"), ring, sums),
        ({}, gradients_at(device="1MiB", cpu="rest"), ring + MIB, sums - MIB),
        ({}, gradients_at(device="rest", cpu="1MiB"), ring + sums - MIB, MIB),
        ({}, gradients_at(device="100%"), sums, 0),
        (TO_HOST, gradients_at(device="100%"), sums, 0),
        (TO_HOST, gradients_at(cpu="100%"), ring, sums),
        (split(0.5), gradients_at(device="50%", cpu="rest"), ring + sums / 2, sums / 2),
    ):
        engine = make_engine(DEVICE, 2, zero=zero, deeptide=own, kind=Even)
        x = torch.randn(2, WIDTH).to(DEVICE)
        for _ in range(2):
            engine.backward(engine(x))
            assert engine.step().applied
        line = gradients_of(engine)
        assert line.measured_bytes == line.predicted_bytes, line
        assert line.measured_off_device_bytes == line.off_device_bytes, line
        assert line.predicted_bytes == pytest.approx(on_device, abs=1.5 * block + 0.01 * sums), own
        assert line.off_device_bytes == pytest.approx(off_device, abs=1.5 * block + 0.2 * off_device), own
        model = models.to_device(models.make_model(kind=Even), DEVICE)
        planned = deeptide.plan(model, models.config(2, zero=zero, deeptide=own)).lines["gradients"]
        assert planned.memory_bytes == line.predicted_bytes
        assert planned.off_device_bytes == line.off_device_bytes
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
def test_gradients_keep_to_their_sizes():
    run(1, keep_gradients_to_sizes)


class Even(models.Wide):
    def __init__(self):
        super().__init__(WIDTH, LAYERS)


def refuse(config, error):
    begin()
    with pytest.raises(deeptide.ConfigError, match=error):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"deeptide": {"placement": {"gradients": {"nvme": "rest"}, "nvme_path": "/tmp"}}},
            r"deeptide\.placement\.gradients in files is not supported yet on .* give the host's memory",
        ),
        (
            {"deeptide": {"keep_grad": True, **gradients_at(cpu="rest")}},
            r"gradients off .* does not go with deeptide\.keep_grad.*; leave keep_grad out",
        ),
        (
            {"zero": split(0.3), "deeptide": gradients_at(cpu="rest")},
            r"gradients off .* does not go with .* of which the host steps 30 %.*; leave the placement out",
        ),
        (
            {"zero": split("auto"), "deeptide": gradients_at(cpu="rest")},
            r"gradients off .* does not go with optimizer states of which the host steps .*; leave the placement out",
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


def refuse_without_a_shard():
    """Refuses where each rank steps all, and where the caller's own optimizer steps."""
    begin()
    own = gradients_at(device="50%", cpu="rest")
    for stage, error in (
        (0, r"gradients off .* does not go with stage 0"),
        (2, r"an optimizer of your own that steps"),
    ):
        model = models.to_device(models.make_model(kind=Model), DEVICE)
        config = models.config(stage, deeptide=own)
        optimizer = None
        if stage:
            del config["optimizer"]
            optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        with pytest.raises(deeptide.ConfigError, match=error):
            deeptide.initialize(model=model, config=config, optimizer=optimizer)
    dist.destroy_process_group()


def test_gradients_that_nobody_could_step_from_the_host_are_named():
    run(2, refuse_without_a_shard)


def run_out_of_memory():
    begin()
    for own, says in ((gradients_at(device="100%"), True), (gradients_at(cpu="100%"), False)):
        engine = make_engine(DEVICE, 2, kind=Even, deeptide=own)
        forecast = sum(line.predicted_bytes for line in engine.memory())
        engine.destroy()
        del engine
        engine = make_engine(DEVICE, 2, kind=Even, deeptide={**own, "device_memory_cap": int(0.99 * forecast)})
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine.backward(engine(torch.randn(2, WIDTH).to(DEVICE)))
        assert ('"placement": {"gradients": {"cpu": "rest"}}} frees' in str(caught.value)) == says
        engine.destroy()
    dist.destroy_process_group()


def test_an_error_for_lack_of_memory_names_the_placement():
    run(1, run_out_of_memory)
