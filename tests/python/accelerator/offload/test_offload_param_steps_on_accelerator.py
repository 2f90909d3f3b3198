# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_param on an accelerator whose device steps all parameters or some: new values leave for the shards."""

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin, simulated_only
from test_offload_on_accelerator import (
    OPTIMIZERS,
    TO_HOST,
    Model,
    batch,
    compare_rounded_masters,
    make_engine,
    make_own,
    pass_on,
    results_of,
    state_of_own,
    step_by_an_own_optimizer,
    train,
)
from test_offload_param_on_accelerator import FEW, Deep, Frozen, in_files, seconds_of_step, write
from test_on_accelerator import check_order, far, on_host, run, unequal
from test_twin_flow_on_accelerator import split

import deeptide

pytestmark = pytest.mark.slow

SCHEDULES = ("late_default", "late_others", "random")


def shards(folder):
    """The places of parameters."""
    few = in_files(folder, buffer_count=1, buffer_size=1000, max_in_cpu=1000)
    return {
        "host": {"offload_param": {"device": "cpu"}},
        "host, small ones kept": {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 70_000},
        "files": {"offload_param": in_files(folder)},
        "few buffers": {"offload_param": few},
    }


def steps(folder):
    """The places of their steps."""
    return {
        "device": {},
        "both": split(0.5),
        "both, in files": split(0.3, folder + "/states"),
    }


def assert_alike(expected, got, bf16, where):
    if ON_GPU:
        assert far(expected, got, 2e-2 if bf16 else 1e-4) == [], where
    else:
        assert unequal(expected, got) == [], where


def compare_places(gas, bf16, type, clipping, frozen, where, folder):
    """Page-locked memory is guarded: the host's access to a shard that is still copied would end the process."""
    controls = begin()
    settings = {
        "gas": gas,
        "bf16": bf16,
        "gradient_clipping": clipping,
        "optimizer": {"type": type, "params": OPTIMIZERS[type]},
        "kind": Frozen if frozen else Model,
    }
    stepped = steps(folder)[where]
    controls.configure("random")
    expected = results_of(DEVICE, 3, zero={**FEW, **stepped}, **settings)
    for name, off in shards(folder).items():
        for schedule in SCHEDULES if name == "host" else ("random",):
            controls.configure(schedule, max_delay_us=300, guard_pinned=True)
            got = results_of(DEVICE, 3, zero={**FEW, **stepped, **off}, **settings)
            check_order(controls)
            assert_alike(expected, got, bf16, (name, schedule))
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "bf16", "type", "clipping", "frozen", "where"),
    [
        (1, 1, False, "AdamW", 1.0, False, "device"),
        (1, 2, True, "SGD", 0.01, True, "device"),
        (2, 2, False, "Lamb", 0.01, False, "device"),
        (2, 1, True, "AdamW", 0.01, False, "device"),
        (1, 2, True, "AdamW", 0.01, False, "both"),
        (2, 1, False, "SGD", 0.0, True, "both"),
        (2, 1, True, "Lamb", 1.0, False, "both"),
        (1, 1, False, "AdamW", 1.0, False, "both, in files"),
        (2, 2, True, "AdamW", 0.01, False, "both, in files"),
    ],
)
def test_shards_off_the_device_change_no_bit(world, gas, bf16, type, clipping, frozen, where, tmp_path):
    run(world, compare_places, gas, bf16, type, clipping, frozen, where, str(tmp_path))


def cross_places(bf16, folder):
    off = shards(folder + "/blocks")
    order = [("cpu", {}), (DEVICE, {**FEW, **off["host"]}), (DEVICE, {}), (DEVICE, {**FEW, **off["files"]})]
    order += [(DEVICE, {**FEW, **split(0.5), **off["host"]}), (DEVICE, {**FEW, **TO_HOST, **off["host"]})]
    order += [(DEVICE, {**FEW, **split(0.3, folder + "/states"), **off["few buffers"]}), (DEVICE, split(0.5))]
    order += [(DEVICE, {**FEW, **off["host, small ones kept"]}), ("cpu", {})]
    pass_on(order, 3, bf16, folder, guard_pinned=True)


@pytest.mark.parametrize(("world", "bf16"), [(1, True), (2, False)])
def test_checkpoints_cross_places(world, bf16, tmp_path):
    run(world, cross_places, bf16, str(tmp_path))


def compare_programs(bf16, where, folder):
    """Programs' writes reach shards and masters, wherever they lie."""
    controls = begin()
    gathered = {**FEW, **steps(folder)[where], "stage3_gather_16bit_weights_on_model_save": True}
    results = []
    for name, off in {"device": {}, **shards(folder + "/blocks")}.items():
        controls.configure("late", guard_pinned=True)
        engine = make_engine(DEVICE, 3, bf16=bf16, zero={**gathered, **off})
        results.append(on_host(write(engine, DEVICE, f"{folder}/{name}")))
        engine.destroy()
        check_order(controls)
        assert_alike(results[0].values(), results[-1].values(), bf16, name)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "bf16", "where"), [(1, True, "device"), (2, False, "device"), (2, True, "both"), (2, False, "both")]
)
def test_what_programs_write_reaches_both(world, bf16, where, tmp_path):
    run(world, compare_programs, bf16, where, str(tmp_path))


def rewind_move_and_rebuild(bf16, where, folder):
    """A rewind's copy, and states that leave between phases, hold masters that parameters are copied from."""
    controls = begin()
    controls.configure("random", guard_pinned=True)
    own = {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 1}
    zero = {**FEW, **steps(folder)[where], "offload_param": {"device": "cpu"}}
    engine = make_engine(DEVICE, 3, bf16=bf16, zero=zero, deeptide=own)
    train(engine, DEVICE, steps=1)
    kept = on_host(models.everything(engine))
    train(engine, DEVICE, steps=1, first=1)
    engine.backward(engine(batch(DEVICE, engine, 2) * float("nan")))
    outcome = engine.step()
    assert not outcome.applied and outcome.rewound_to == 1, outcome
    models.assert_same(kept, on_host(models.everything(engine)))
    line = {line.role: line for line in engine.memory()}["optimizer states"]
    assert line.measured_bytes == line.predicted_bytes
    assert line.measured_off_device_bytes == line.off_device_bytes
    engine.rebuild()
    models.assert_same(kept, on_host(models.everything(engine)))
    train(engine, DEVICE, steps=1, first=3)
    expected = on_host(models.everything(engine))
    engine.destroy()
    for device in ("cpu", "nvme"):
        engine = make_engine(DEVICE, 3, bf16=bf16, zero=zero)
        train(engine, DEVICE, steps=1)
        engine.offload_states(device=device, nvme_path=folder)
        weight = engine.module.wide.weight
        engine._core.set_full_state("wide.weight", "master", engine._core.full_state("wide.weight", "master"))
        assert torch.equal(weight.detach().cpu().float(), kept["wide.weight"].float())
        engine.reload_states()
        train(engine, DEVICE, steps=1, first=3)
        models.assert_same(expected, on_host(models.everything(engine)))
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(("bf16", "where"), [(True, "device"), (False, "device"), (True, "both"), (False, "both")])
def test_an_engine_rewinds_moves_states_and_is_rebuilt(bf16, where, tmp_path):
    run(1, rewind_move_and_rebuild, bf16, where, str(tmp_path))


def compare_memory(bf16, where, folder):
    """The device has less by the shards, but for masters of fp32; every byte is forecast and planned."""
    controls = begin()
    controls.configure("random")
    lines = {}
    stepped = steps(folder)[where]
    for name, off in {"device": {}, **shards(folder)}.items():
        zero = {**FEW, **stepped, **off}
        engine = make_engine(DEVICE, 3, bf16=bf16, zero=zero, kind=Deep)
        train(engine, DEVICE)
        torch.accelerator.synchronize()
        assert_bytes_as_planned(engine, models.make_model(kind=Deep), models.config(3, bf16=bf16, zero=zero), name)
        lines[name] = {line.role: line for line in engine.memory()}
        engine.destroy()
        del engine
    numel = sum(p.numel() for p in Deep().parameters()) // dist.get_world_size()
    for name in ("host", "files", "few buffers"):
        assert lines[name]["parameters"].predicted_bytes == 0, name
        assert lines[name]["parameters"].off_device_bytes > 0, name
        states = lines[name]["optimizer states"].predicted_bytes - lines["device"]["optimizer states"].predicted_bytes
        share = 0 if bf16 else 4 * numel * (1.0 if where == "device" else 0.5 if where == "both" else 0.7)
        through = 2 * 4 * 2**20 if bf16 else 0  # in which bf16 parameters leave, at most
        assert share * 0.8 <= states <= share * 1.2 + through, name
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "bf16", "where"),
    [(1, True, "device"), (2, False, "device"), (2, True, "both"), (1, False, "both, in files")],
)
def test_every_byte_is_forecast(world, bf16, where, tmp_path):
    run(world, compare_memory, bf16, where, str(tmp_path))


def count_waits():
    """None that a lost peer could hold for ever: the verdict's figures are polled, as with shards on the device."""
    controls = begin()
    controls.configure("late", guard_pinned=True, staged=0)
    for bf16 in (False, True):
        engine = make_engine(DEVICE, 3, bf16=bf16, zero={**FEW, "offload_param": {"device": "cpu"}})
        for step in range(3):
            inputs = batch(DEVICE, engine, step)
            controls.host_waits()
            engine.backward(engine(inputs))
            assert controls.host_waits() == []
            assert engine.step()
            assert controls.host_waits() == []
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


def test_no_call_of_a_step_waits_for_the_device():
    run(2, count_waits)


def compare_with_shards_on_the_device(folder):
    """If computation is long enough, new values leave and come while the device computes."""
    controls = begin()
    rate = 1e6
    without = seconds_of_step(controls, {}, rate, rate / 2, rate / 2)
    for name in ("host", "files"):
        off = seconds_of_step(controls, shards(folder)[name], rate, rate / 2, rate / 2)
        copies = seconds_of_step(controls, shards(folder)[name], 0, rate / 2, rate / 2)
        print(f"{name}: without {without}, offloaded {off}: {off / without:.3f}; copies alone {copies}")
        if name == "host":  # to files the host waits for the last copy
            assert off <= 1.05 * without
        assert copies > 0.05 * without, name  # they would show
    dist.destroy_process_group()


@simulated_only
def test_leaving_costs_no_more_than_a_twentieth_where_computation_is_long(tmp_path):
    run(1, compare_with_shards_on_the_device, str(tmp_path))


def measure_and_place(folder):
    """An automatic ratio, and states in three tiers, beside shards on the host."""
    controls = begin()
    controls.configure("random", guard_pinned=True)
    off = {**FEW, "offload_param": {"device": "cpu"}}
    engine = make_engine(DEVICE, 3, bf16=True, zero={**off, **split("auto")})
    ratio = engine._core.offload_ratio()
    assert 0 <= ratio <= 1
    train(engine, DEVICE)
    got = on_host(models.everything(engine))
    engine.destroy()
    three = {"placement": {"optimizer_states": {"device": "30%", "cpu": "40%", "nvme": "rest"}, "nvme_path": folder}}
    expected = []
    for settings in (
        {"zero": {**FEW, **split(ratio)}},
        {"zero": {**off, **split(0.7)}},
        {"zero": off, "deeptide": three},
    ):
        engine = make_engine(DEVICE, 3, bf16=True, **settings)
        train(engine, DEVICE)
        expected.append(on_host(models.everything(engine)))
        line = {line.role: line for line in engine.memory()}["optimizer states"]
        assert line.measured_bytes == line.predicted_bytes, line
        assert line.measured_off_device_bytes == line.off_device_bytes, line
        engine.destroy()
    assert_alike(expected[0].values(), got.values(), True, ratio)
    assert_alike(expected[1].values(), expected[2].values(), True, "three tiers")
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_a_measured_ratio_and_three_tiers_go_with_it(world, tmp_path):
    run(world, measure_and_place, str(tmp_path))


@pytest.mark.parametrize(("world", "moments", "off"), [(1, False, "host"), (2, True, "files"), (2, False, "host")])
def test_the_host_steps_masters_of_16_bits(world, moments, off, tmp_path):
    run(world, compare_rounded_masters, 3, moments, {**FEW, **TO_HOST, **shards(str(tmp_path))[off]})


def round_masters_on_the_device(folder):
    """Parameters of 16 bits that are their own masters have copies of these on the device, where it steps them."""
    controls = begin()
    results = []
    for off in ({}, *shards(folder).values()):
        controls.configure("random", guard_pinned=True)
        cfg = models.config(3, gas=2, bf16=True, zero={**FEW, **off}, gradient_clipping=0.01)
        cfg["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        model = models.to_device(models.make_model(kind=Model), DEVICE)
        engine = deeptide.initialize(model=model, config=cfg)[0]
        train(engine, DEVICE, gas=2, steps=1)
        with torch.no_grad():
            engine.module.layers[1].bias.add_(1)  # its master follows
        train(engine, DEVICE, gas=2, steps=1, first=1)
        results.append(on_host(models.everything(engine)))
        line = {line.role: line for line in engine.memory()}["optimizer states"]
        assert line.measured_bytes == line.predicted_bytes
        engine.destroy()
        assert_alike(results[0].values(), results[-1].values(), True, off)
    check_order(controls)
    dist.destroy_process_group()


def test_the_device_steps_masters_of_16_bits(tmp_path):
    run(2, round_masters_on_the_device, str(tmp_path))


@pytest.mark.parametrize(("world", "bf16", "off"), [(1, True, "host"), (2, False, "host"), (2, True, "files")])
def test_an_optimizer_of_the_programs_own_steps_on_the_host(world, bf16, off, tmp_path):
    offload = {**FEW, **TO_HOST, **shards(str(tmp_path / "blocks"))[off]}
    run(world, step_by_an_own_optimizer, 3, bf16, str(tmp_path), offload)


def step_by_an_own_optimizer_on_the_device(bf16, folder):
    controls = begin()
    results = []
    for off in ({}, *shards(folder).values()):
        controls.configure("random", guard_pinned=True)
        engine = make_own(DEVICE, 3, bf16, {**FEW, **off})
        train(engine, DEVICE)
        results.append(state_of_own(engine))
        engine.destroy()
        assert_alike(results[0].values(), results[-1].values(), bf16, off)
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "bf16"), [(1, False), (2, True)])
def test_an_optimizer_of_the_programs_own_steps_on_the_device(world, bf16, tmp_path):
    run(world, step_by_an_own_optimizer_on_the_device, bf16, str(tmp_path))
