# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_optimizer.ratio on an accelerator: the host steps a share of the elements while the device steps the rest."""

import gc
import re

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin, simulated_only, warm_up
from test_offload_on_accelerator import (
    OPTIMIZERS,
    TO_HOST,
    WIDTH,
    Model,
    batch,
    make_engine,
    pass_on,
    results_of,
    train,
)
from test_on_accelerator import check_order, far, on_host, run, unequal

import deeptide
from deeptide import utils

BLOCK = 2**16  # elements: where a unit may be cut
NUMEL = sum(p.numel() for p in Model().parameters())
SCHEDULES = ("late_default", "late_others", "random")


def split(ratio, folder=None):
    place = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
    return {"offload_optimizer": {**place, "ratio": ratio}}


def state_after_a_step(controls, zero, folder, **settings):
    """From a checkpoint, which all begin at."""
    engine = make_engine(DEVICE, zero=zero, **settings)
    engine.load_checkpoint(folder)
    train(engine, DEVICE, steps=1, first=1)
    state = on_host(models.everything(engine))
    text = engine._core.summary()
    engine.destroy()
    check_order(controls)
    return state, text


def compare_elements(stage, bf16, type, folder, swap):
    """Each element is stepped as without offload, or as with all of it: the first ones of a unit, then the others."""
    controls = begin()
    settings = {"stage": stage, "bf16": bf16, "optimizer": {"type": type, "params": OPTIMIZERS[type]}}
    settings["gradient_clipping"] = 0.01
    controls.configure("random")
    engine = make_engine(DEVICE, **settings)
    train(engine, DEVICE, steps=1)
    engine.save_checkpoint(folder)
    engine.destroy()
    states = {ratio: state_after_a_step(controls, split(ratio), folder, **settings)[0] for ratio in (0, 1)}
    whole, _ = state_after_a_step(controls, {}, folder, **settings)
    models.assert_same(states[0], whole)
    world = dist.get_world_size() if stage else 1
    shard = WIDTH * (WIDTH + 1) // world  # of the wide unit
    for ratio in (0.3, 0.5):
        for schedule in SCHEDULES:
            controls.configure(schedule, max_delay_us=300, guard_pinned=True)
            got, text = state_after_a_step(controls, split(ratio, swap), folder, **settings)
            share = float(re.search(r"of ([0-9.]+) % off it", text)[1]) / 100
            assert abs(share - ratio) * NUMEL / world <= BLOCK, text
            told_apart = 0
            for name, value in got.items():
                beside, moved = states[0][name].flatten(), states[1][name].flatten()
                value = value.flatten()
                assert bool(((value == beside) | (value == moved)).all()), (name, schedule)
                if name != "wide.weight/master":
                    continue
                on_device = ((value == beside) & (beside != moved)).nonzero().flatten()
                off_it = ((value == moved) & (beside != moved)).nonzero().flatten()
                told_apart += len(on_device) * len(off_it)
                if world == 1:
                    assert on_device.max() // BLOCK < off_it.min() // BLOCK, "the unit is cut between two blocks"
                assert len(off_it) / (len(on_device) + len(off_it)) == pytest.approx(ratio, abs=1.5 * BLOCK / shard)
            assert told_apart or ON_GPU
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only  # a GPU's kernels round as it likes
@pytest.mark.parametrize(
    ("world", "stage", "bf16", "type", "files"),
    [
        (1, 0, False, "AdamW", False),
        (1, 2, True, "AdamW", True),
        (2, 0, True, "AdamW", False),
        (2, 1, False, "AdamW", True),
        (2, 2, True, "AdamW", False),
        (2, 3, False, "AdamW", False),
    ],
)
def test_each_element_is_stepped_where_it_lies(world, stage, bf16, type, files, tmp_path):
    swap = str(tmp_path / "swap") if files else None
    run(world, compare_elements, stage, bf16, type, str(tmp_path), swap)


def compare_runs(stage, bf16, type, ratio):
    """Several steps, in every schedule alike, and close to a run without offload; LAMB's norms are of both parts."""
    controls = begin()
    settings = {"bf16": bf16, "optimizer": {"type": type, "params": OPTIMIZERS[type]}, "gradient_clipping": 0.01}
    controls.configure("random")
    without = results_of(DEVICE, stage, gas=2, **settings)
    runs = []
    for schedule in SCHEDULES:
        controls.configure(schedule, max_delay_us=300, guard_pinned=True)
        runs.append(results_of(DEVICE, stage, gas=2, zero=split(ratio), **settings))
        check_order(controls)
    for other in runs[1:]:
        assert unequal(runs[0], other) == [] or ON_GPU
    assert far(without, runs[0], 2e-2 if bf16 else 1e-4) == []
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16", "type", "ratio"),
    [
        (1, 0, False, "Lamb", 0.5),
        (1, 2, True, "SGD", 0.3),
        (2, 0, False, "Lamb", 0.3),
        (2, 1, True, "Lamb", 0.5),
        (2, 3, False, "Lamb", 0.3),
        (2, 3, True, "AdamW", 0.5),
    ],
)
def test_a_run_depends_on_no_schedule(world, stage, bf16, type, ratio):
    run(world, compare_runs, stage, bf16, type, ratio)


def cross_ratios(stage, bf16, folder):
    order = [
        (DEVICE, split(0.3)),
        (DEVICE, split(0.5, folder + "/blocks")),
        ("cpu", {}),
        (DEVICE, split(0.5)),
        (DEVICE, {}),
        (DEVICE, split(0.3)),
        (DEVICE, TO_HOST),
    ]
    pass_on(order, stage, bf16, folder)


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (3, False)])
def test_checkpoints_cross_ratios(stage, bf16, tmp_path):
    run(2, cross_ratios, stage, bf16, str(tmp_path))


def compare_memory(stage, bf16, ratio, folder):
    """The device has less by the share of the states, as planned and forecast."""
    controls = begin()
    controls.configure("random", workspace=1 << 20)
    warm_up(make_engine(DEVICE, stage, bf16=bf16), train)
    kept, lines = {}, {}
    for name, zero in (("device", {}), ("split", split(ratio, folder))):
        gc.collect()
        torch.accelerator.empty_cache()
        held = torch.accelerator.memory_allocated()
        engine = make_engine(DEVICE, stage, bf16=bf16, zero=zero)
        train(engine, DEVICE)
        torch.accelerator.synchronize()
        kept[name] = torch.accelerator.memory_allocated() - held
        assert_bytes_as_planned(engine, models.make_model(kind=Model), models.config(stage, bf16=bf16, zero=zero))
        for line in engine.memory():
            if line.role == "optimizer states":
                lines[name] = line
            if line.role in ("gradients", "communication"):  # of which a share leaves, too
                kept[name] -= line.predicted_bytes
        engine.destroy()
        del engine
    states = lines["device"].predicted_bytes
    item = 12 if bf16 else 8  # of an element's states on the device: masters of fp32 are the parameters there
    assert states - lines["split"].predicted_bytes == pytest.approx(ratio * states, abs=item * BLOCK)
    assert kept["device"] - kept["split"] == pytest.approx(ratio * states, abs=1.1 * item * BLOCK)
    assert lines["split"].off_device_bytes > 0
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16", "ratio", "files"),
    [(1, 2, True, 0.3, False), (2, 1, False, 0.5, False), (2, 3, True, 0.5, True), (2, 0, False, 0.3, True)],
)
def test_the_device_has_less_by_the_share(world, stage, bf16, ratio, files, tmp_path):
    run(world, compare_memory, stage, bf16, ratio, str(tmp_path) if files else None)


def seconds_of_step(controls, zero, **rates):
    """Simulated, of step() alone."""
    engine = make_engine(DEVICE, 2, bf16=True, zero=zero)
    for step in range(2):
        controls.configure("late")
        engine.backward(engine(batch(DEVICE, engine, step)))
        torch.accelerator.synchronize()
        controls.configure("late", **rates)
        start = controls.host_time_s()
        assert engine.step()
        torch.accelerator.synchronize()
        seconds = controls.host_time_s() - start
    engine.destroy()
    return seconds


def overlap_sides():
    """Half of the elements each: what either side would take for all of them takes half as long."""
    controls = begin()
    rate = 1e8
    check = seconds_of_step(controls, TO_HOST, compute=rate)  # of all gradients, on the device: before any is stepped
    device = seconds_of_step(controls, {}, compute=rate) - check
    host = seconds_of_step(controls, TO_HOST, to_device=rate)
    slowed = rate * device / host  # so that the device takes as long as the copies
    both = seconds_of_step(controls, split(0.5), compute=slowed, to_device=rate) - check * rate / slowed
    print(f"either side alone {host}, half of each {both}: {both / host:.3f}")
    check_order(controls)
    assert 0.45 * host < both < 0.55 * host, (check, device, host, both)
    dist.destroy_process_group()


@simulated_only
def test_host_and_device_step_at_the_same_time():
    run(1, overlap_sides)


def measure(folder):
    """All ranks agree on a share; it is said and recorded."""
    controls = begin()
    controls.configure("random")
    engine = make_engine(DEVICE, 2, bf16=True, zero=split("auto", folder))
    ratio = engine._core.offload_ratio()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, ratio)
    assert len(set(every)) == 1
    assert 0 <= ratio <= 1
    text = engine._core.summary()
    assert f"ratio: {ratio:.2f}, at which host and device step equally long" in text, text
    for line in engine.memory():
        if line.role == "optimizer states":
            total = 12 * NUMEL / dist.get_world_size()
            assert line.predicted_bytes == pytest.approx((1 - ratio) * total, abs=12 * BLOCK)
            assert line.measured_bytes == line.predicted_bytes
            assert ratio == 0 or line.measured_off_device_bytes == line.off_device_bytes
    train(engine, DEVICE)
    engine.destroy()
    planned = deeptide.plan(
        models.to_device(models.make_model(kind=Model), DEVICE), models.config(2, bf16=True, zero=split("auto", folder))
    ).lines["optimizer states"]
    assert planned.memory_bytes >= 12 * NUMEL  # either place may get all
    assert (planned.file_bytes if folder else planned.off_device_bytes) >= 12 * NUMEL
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "files"), [(1, True), (2, False)])
def test_an_automatic_ratio_is_measured_and_agreed(world, files, tmp_path):
    run(world, measure, str(tmp_path) if files else None)


def act_between_steps(stage, bf16):
    """Programs' acts on states and parameters reach both parts."""
    controls = begin()
    controls.configure("late", guard_pinned=True)
    own = {"drift_interval": 1, "on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 1}
    engine = make_engine(DEVICE, stage, bf16=bf16, zero=split(0.5), deeptide=own)
    train(engine, DEVICE, steps=1)
    weight = engine.module.wide.weight
    values = torch.arange(weight.numel(), dtype=torch.float32).reshape(weight.shape) / weight.numel()
    for role in ("master", "exp_avg"):
        engine._core.set_full_state("wide.weight", role, values)
        assert torch.equal(engine._core.full_state("wide.weight", role), values)
    assert torch.equal(engine.module_state_dict()["wide.weight"].cpu(), values.to(weight.dtype))
    with torch.no_grad():
        weight.add_(1)  # masters follow
    written = engine.module_state_dict()["wide.weight"].cpu().float()
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu().to(weight.dtype).float(), written)
    kept = on_host(models.everything(engine))
    engine.backward(engine(batch(DEVICE, engine, 2) * float("nan")))
    assert not engine.step().applied
    train(engine, DEVICE, steps=1, first=3)
    assert any(not torch.equal(kept[name], value) for name, value in on_host(models.everything(engine)).items())
    line = {line.role: line for line in engine.memory()}["optimizer states"]
    assert line.measured_bytes == line.predicted_bytes
    assert line.measured_off_device_bytes == line.off_device_bytes
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage", "bf16"), [(1, 0, True), (2, 0, False), (2, 2, True), (2, 3, False)])
def test_programs_reach_both_parts(world, stage, bf16):
    run(world, act_between_steps, stage, bf16)


def move_between_phases(folder):
    """offload_states takes the device's part to the host, or all to files; reload_states brings each to its place."""
    controls = begin()
    controls.configure("late", guard_pinned=True)
    results = []
    for device in (None, "cpu", "nvme"):
        engine = make_engine(DEVICE, 2, bf16=True, zero=split(0.5))
        train(engine, DEVICE, steps=1)
        before = engine.memory()
        if device:
            held = torch.accelerator.memory_allocated()
            engine.offload_states(device=device, nvme_path=folder)
            assert held - torch.accelerator.memory_allocated() >= 0.98 * 6 * NUMEL / dist.get_world_size()
            engine.reload_states()
            assert [line.predicted_bytes for line in engine.memory()] == [line.predicted_bytes for line in before]
        train(engine, DEVICE, steps=1, first=1)
        engine.rebuild()
        results.append(on_host(models.everything(engine)))
        engine.destroy()
    for other in results[1:]:
        models.assert_same(results[0], other)
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize("world", [1, 2])
def test_states_of_both_parts_move_between_phases(world, tmp_path):
    run(world, move_between_phases, str(tmp_path))
