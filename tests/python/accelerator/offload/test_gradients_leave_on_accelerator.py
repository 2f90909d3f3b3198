# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients leave an accelerator during backward for the host that steps them."""

import contextlib
import gc

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin, simulated_only
from test_offload_on_accelerator import TO_HOST
from test_on_accelerator import check_order, far, on_host, run, unequal
from test_twin_flow_on_accelerator import split

import deeptide
from deeptide import utils

WIDTH, LAYERS = 300, 8  # units of 90300 elements: more than a block of Twin-Flow's cut


def make_engine(device, stage, gas=1, bf16=False, zero=None, layers=LAYERS, width=WIDTH, freeze=False, **extra):
    model = models.make_model(kind=models.Wide, width=width, layers=layers)
    if freeze:
        model.layers[1].requires_grad_(False)
    cfg = models.config(stage, gas=gas, bf16=bf16, zero=zero or {}, **extra)
    return deeptide.initialize(model=models.to_device(model, device), config=cfg)[0]


def loss_of(engine, device, seed, width=WIDTH):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    dtype = next(engine.module.parameters()).dtype
    return engine(torch.randn(2, width, generator=generator).to(dtype).to(device))


def line_of(engine):
    return {line.role: line for line in engine.memory()}["gradients"]


def act_on_gradients(device, zero, stage, bf16, keep):
    """Acts like programs between backward and step; returns what they see, and what comes of it."""
    own = {"deeptide": {"keep_grad": True}} if keep else {}
    engine = make_engine(device, stage, gas=2, bf16=bf16, zero=zero, freeze=True, gradient_clipping=0.5, **own)
    module, seen = engine.module, []

    def accumulate(first, scopes=(None, None)):
        for micro in range(2):
            with engine.no_sync() if scopes[micro] else contextlib.nullcontext():
                engine.backward(loss_of(engine, device, first + micro))
            if micro == 0:
                engine.step()

    def step():
        outcome = engine.step()
        seen.append(torch.tensor([float(outcome.applied), outcome.grad_norm if outcome.applied else 0.0]))

    accumulate(0)
    seen += [utils.safe_get_full_grad(p) for p in module.parameters() if p.requires_grad]
    assert utils.safe_get_full_grad(module.layers[1].weight) is None
    bias = module.layers[2].bias
    utils.safe_set_full_grad(bias, torch.full(bias.shape, 0.25))
    seen.append(utils.safe_get_full_grad(bias))
    if keep:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    step()
    accumulate(2)
    engine.zero_grad()
    accumulate(4)
    step()
    engine.backward(loss_of(engine, device, 6) * float("nan"))  # in one micro-batch of two
    engine.step()
    engine.backward(loss_of(engine, device, 7))
    step()
    if stage < 2:
        accumulate(8, scopes=(True, None))
        step()
    engine.backward(loss_of(engine, device, 10))  # more passes than one belong to a micro-batch
    engine.backward(loss_of(engine, device, 11))
    engine.step()
    engine.backward(loss_of(engine, device, 12))
    step()
    line = line_of(engine)
    assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02), line
    assert line.measured_off_device_bytes == line.off_device_bytes
    seen += models.everything(engine).values()
    engine.destroy()
    return [torch.as_tensor(value).detach().cpu() for value in seen], line.off_device_bytes


def compare_programs(stage, bf16, keep):
    controls = begin()
    expected, none = act_on_gradients("cpu", {}, stage, bf16, keep)
    assert none == 0
    for schedule in ("late_default", "late_others", "random"):
        controls.configure(schedule, max_delay_us=300, guard_pinned=True)
        got, off_device = act_on_gradients(DEVICE, TO_HOST, stage, bf16, keep)
        check_order(controls)
        assert (off_device > 0) == (stage > 0 or dist.get_world_size() == 1)
        if ON_GPU:
            assert far(expected, got, 2e-2 if bf16 else 1e-4) == []
        else:
            assert unequal(expected, got) == [], (schedule, len(got))
    controls.configure("late", guard_pinned=True)
    parts, off_device = act_on_gradients(DEVICE, split(0.4), stage, bf16, keep)  # what stays has the device's bits
    check_order(controls)
    assert (off_device > 0) == (stage > 0 or dist.get_world_size() == 1)
    assert far(expected, parts, 2e-2 if bf16 else 1e-4) == []
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16", "keep"),
    [
        (1, 0, True, True),
        (1, 2, False, False),
        (2, 0, False, False),
        (2, 1, True, False),
        (2, 2, False, True),
        (2, 3, True, False),
    ],
)
def test_programs_reach_gradients_that_have_left(world, stage, bf16, keep):
    run(world, compare_programs, stage, bf16, keep)


def skip_overflows(stage):
    """In fp16: a step that overflows moves nothing, and the next one begins anew."""
    controls = begin()
    results = []
    for device, zero in (("cpu", {}), (DEVICE, TO_HOST)):
        controls.configure("random", guard_pinned=True)
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine = make_engine(device, stage, zero=zero, fp16=fp16)
        outcomes = []
        for step, factor in enumerate((1.0, 1e30, 1.0, float("inf"), 1.0)):
            engine.backward(loss_of(engine, device, step) * factor)
            outcome = engine.step()
            outcomes.append((outcome.applied, outcome.parameter, outcome.rank))
        results.append((outcomes, on_host(models.everything(engine))))
        engine.destroy()
    check_order(controls)
    (expected, states), (got, moved) = results
    assert [applied for applied, *_ in got] == [True, False, True, False, True]
    assert got == expected
    if not ON_GPU:
        models.assert_same(states, moved)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_overflows_of_gradients_that_have_left_skip_the_step(world, stage):
    run(world, skip_overflows, stage)


def compare_memory(stage, bf16, zero, share):
    """The device has the ring of two sums, and what stays, in the place of all."""
    controls = begin()
    controls.configure("random")
    settings = {"stage": stage, "bf16": bf16, "gas": 2}
    lines, used = {}, {}
    for name, place in (("device", {}), ("host", zero)):
        gc.collect()  # the model before, else freed at some time between here and the count
        torch.accelerator.empty_cache()
        held = torch.accelerator.memory_allocated()
        engine = make_engine(DEVICE, zero=place, **settings)
        for micro in range(4):
            engine.backward(loss_of(engine, DEVICE, micro))
            engine.step()
        torch.accelerator.synchronize()
        used[name] = torch.accelerator.memory_allocated() - held
        assert_bytes_as_planned(
            engine,
            models.make_model(kind=models.Wide, width=WIDTH, layers=LAYERS),
            models.config(zero=place, **settings),
        )
        for line in engine.memory():
            used[name] -= line.predicted_bytes if line.role in ("optimizer states", "communication") else 0
        lines[name] = line_of(engine)
        assert ("gradients: leave for the host's memory" in engine._core.summary()) == (name == "host")
        engine.offload_states()
        assert torch.accelerator.memory_allocated() - held <= used[name] - lines[name].predicted_bytes + 4096
        engine.reload_states()
        engine.destroy()
        del engine
    sums = lines["device"].predicted_bytes
    numel = WIDTH * (WIDTH + 1) * LAYERS
    assert sums == pytest.approx(4 * numel / dist.get_world_size(), rel=0.01)
    ring = 2 * sums / LAYERS
    less = share * sums - ring
    block = 4 * 2**16
    assert sums - lines["host"].predicted_bytes == pytest.approx(less, abs=1 + (share < 1) * block)
    assert used["device"] - used["host"] == pytest.approx(less, abs=0.02 * sums + (share < 1) * block)
    assert share * sums <= lines["host"].off_device_bytes + (share < 1) * block <= 1.2 * sums + block
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "stage", "bf16", "ratio"), [(1, 2, True, 1.0), (1, 2, False, 0.5), (2, 1, False, 1.0), (2, 3, True, 1.0)]
)
def test_the_device_has_a_ring_in_the_place_of_sums(world, stage, bf16, ratio):
    run(world, compare_memory, stage, bf16, TO_HOST if ratio == 1.0 else split(ratio), ratio)


def seconds_of(controls, gas, rates):
    """Simulated, of all micro-batches of a step, and of step() after the device is done."""
    engine = make_engine(DEVICE, 2, gas=gas, bf16=True, zero=TO_HOST, width=128, layers=24)
    results = []
    for step in range(2):
        controls.configure("late", **rates)
        torch.accelerator.synchronize()
        start = controls.host_time_s()
        for micro in range(gas):
            if micro:
                engine.step()
            engine.backward(loss_of(engine, DEVICE, step * gas + micro, width=128))
        torch.accelerator.synchronize()
        backward = controls.host_time_s() - start
        start = controls.host_time_s()
        assert engine.step().applied
        torch.accelerator.synchronize()
        results = [backward, controls.host_time_s() - start]
    engine.destroy()
    return results


def overlap_backward():
    """Copies of the sums hide behind backward; a quarter of their time at most is left for the step."""
    controls = begin()
    rate = 1e8
    for gas in (1, 3):
        alone, step_alone = seconds_of(controls, gas, {"compute": rate})
        numel = 24 * 128 * 129
        micro = alone / gas  # of which backward, in which copies may hide, is a part
        slow = 4 * numel / (0.4 * micro)
        copies = {"to_host": slow, "to_device": slow}
        hidden, step = seconds_of(controls, gas, {"compute": rate, **copies})
        print(f"gas {gas}: without copies {alone}, with them {hidden}: {hidden / alone:.3f}; step {step_alone}, {step}")
        last = 0.4 * micro / 24  # the copies of one unit; of each micro-batch those of the last units stand alone
        assert hidden <= alone + gas * 3.5 * last, (gas, hidden, alone, step, step_alone)
        back = 2 * numel / slow  # of parameters, in bf16
        # The last two units are summed as step() begins; in the simulation a copy back, the sum and a copy out of each.
        assert step <= 1.01 * (step_alone + back + 4 * numel / slow / 4), (step, step_alone, back)
    check_order(controls)
    dist.destroy_process_group()


@simulated_only
def test_copies_of_sums_hide_behind_backward():
    run(1, overlap_backward)


def wait_for_nothing():
    """The host waits for the device at the verdict and for what it steps, never in forward and backward."""
    controls = begin()
    controls.configure("random", staged=0)
    engine = make_engine(DEVICE, 2, gas=2, zero=TO_HOST)
    inputs = torch.randn(2, WIDTH).to(DEVICE)
    for _ in range(4):
        controls.host_waits()
        engine.backward(engine(inputs))
        assert controls.host_waits() == []
        engine.step()
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_the_host_waits_for_nothing_in_backward(world):
    run(world, wait_for_nothing)
