# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine on an accelerator: the CPU's bits on the simulated one, and no access that nothing orders."""

import gc
import itertools
import time

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin, simulated_only
from conftest import run_processes
from test_leaks import settled_usage, usage

import deeptide

STEPS, MICRO = 3, 2


def make_model(device):
    return models.to_device(models.make_model(), device)


def train(device, stage, gas, clipping, bf16=False, own=False, **extra):
    """Trains this rank's part, with an optimizer of torch's if `own`; returns losses, norms and weights, on the CPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(device)
    cfg = models.config(stage, micro=MICRO, gas=gas, bf16=bf16, gradient_clipping=clipping, **extra)
    optimizer = None
    if own:
        del cfg["optimizer"]
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-5, foreach=False)
    engine, *_ = deeptide.initialize(model=model, config=cfg, optimizer=optimizer)
    results = []
    for tokens, targets in models.batches(STEPS, MICRO * gas * size):
        for micro in range(gas):
            first = (micro * size + rank) * MICRO
            part = slice(first, first + MICRO)
            loss = engine(tokens[part].to(device), targets[part].to(device))
            engine.backward(loss)
            outcome = engine.step()
            results.append(loss.detach().cpu())
        assert outcome.applied
        results.append(torch.tensor(outcome.grad_norm))
    results += [engine._core.full_state(name, "master").cpu() for name, _ in model.named_parameters()]
    engine.destroy()
    return results


def run(world, function, *args):
    """Prints what rank 0 does."""
    preload = ("torch._dynamo",)  # torch's optimizers would load it in each rank
    ranks = run_processes(world, function, *args, preload=preload)
    print(ranks[0].stdout)


def check_order(controls):
    found = controls.settle()
    assert found == "", found


def unequal(expected, got):
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)]


def far(expected, got, tolerance=1e-5):
    pairs = enumerate(zip(expected, got, strict=True))
    return [i for i, (a, b) in pairs if not torch.allclose(a, b, rtol=tolerance, atol=tolerance)]


def compare_with_cpu(stages, gas, clipping, bf16):
    """With an optimizer of torch's: our own kernels for CPUs fuse multiply-adds, which ATen's operators do not."""
    controls = begin()
    for stage in stages:
        expected = train("cpu", stage, gas, clipping, bf16, own=True)
        controls.configure("late_default" if stage % 2 == 0 else "late_others")
        got = train(DEVICE, stage, gas, clipping, bf16, own=True)
        check_order(controls)
        if ON_GPU:
            assert far(expected, got, 2e-2 if bf16 else 1e-4) == [], stage
        else:
            assert unequal(expected, got) == [], stage
            assert controls.checked() > 1000
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "clipping", "bf16"),
    [
        (1, 1, 1.0, False),
        (1, 2, 0.0, True),
        (2, 1, 0.0, False),
        (2, 2, 1.0, True),
        (3, 1, 1.0, True),
        (3, 2, 0.0, False),
    ],
)
def test_the_engine_trains_as_on_a_cpu_bit_for_bit(world, gas, clipping, bf16):
    run(world, compare_with_cpu, [0, 1, 2, 3], gas, clipping, bf16)


def compare_stages():
    """Kernels for CPUs fuse multiply-adds: an fp32 rounding of 6e-8 in each of three steps of 1e-2, divided by eps."""
    controls = begin()
    on_cpu = train("cpu", 2, 1, 1.0)
    results = []
    for stage in range(4):
        controls.configure("random", max_delay_us=1000, seed=stage)
        results.append(train(DEVICE, stage, 1, 1.0))
        check_order(controls)
        assert unequal(results[0], results[-1]) == [], stage
        assert far(on_cpu, results[-1], 1e-4 if ON_GPU else 1e-5) == []
    dist.destroy_process_group()


@pytest.mark.costly
def test_all_stages_give_the_same_bits_with_adam():
    run(2, compare_stages)


def count_waits(stage):
    """None in forward and backward; one per step, for the verdict, whatever the step does.

    Between ranks that one is no call that waits: a device that has lost a peer would never let it return.
    """
    controls = begin()
    controls.configure("late", staged=0)  # no copy from memory that is not pinned, however small
    fp16 = {"enabled": True, "initial_scale_power": 4}
    for settings in ({"gas": 2}, {"gradient_clipping": 0.0}, {"bf16": True, "gas": 2}, {"fp16": fp16}):
        gas = settings.get("gas", 1)
        engine = deeptide.initialize(model=make_model(DEVICE), config=models.config(stage, **settings))[0]
        for step in range(3):
            waits = []
            for tokens, targets in models.batches(gas, 2, seed=step):
                inputs = tokens.to(DEVICE), targets.to(DEVICE)
                controls.host_waits()
                engine.backward(engine(*inputs))
                assert controls.host_waits() == []
                outcome = engine.step()
                waits += controls.host_waits()
            assert outcome.applied
            alone = dist.get_world_size() == 1
            assert len(waits) == alone, (settings, waits)  # for the squares, which tell whether all is finite
            assert ON_GPU or not alone or waits == ["copy_ device to host"], (settings, waits)
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_the_host_waits_once_a_step(world, stage):
    run(world, count_waits, stage)


def count_waits_of_a_skipped_step(stage):
    """The verdict; where the first bad element is; whether a loss was bad."""
    controls = begin()
    controls.configure("late", staged=0)
    engine = deeptide.initialize(model=make_model(DEVICE), config=models.config(stage))[0]
    engine.module.h[1].register_full_backward_hook(lambda *_: tuple(g / 0 for g in _[1]))
    inputs = [tensor.to(DEVICE) for tensor in models.batches(1, 2)[0]]
    controls.host_waits()
    engine.backward(engine(*inputs))
    assert controls.host_waits() == []
    outcome = engine.step()
    waits = controls.host_waits()
    assert not outcome.applied
    assert outcome.phase == "backward"
    assert len(waits) <= 3, waits
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_step_waits_twice_more(stage):
    run(2, count_waits_of_a_skipped_step, stage)


def train_until_memory_ends(controls, stage, room):
    """Trains once with so much memory. Returns the phase that ran out ("": none did), and the text of its error."""
    before = controls.used_bytes()
    tokens, targets = (tensor.to(DEVICE) for tensor in models.batches(1, 2)[0])
    model, engine, phase, text = make_model(DEVICE), None, "initialize", ""
    controls.configure("random", cap=controls.used_bytes() + room)
    try:
        engine = deeptide.initialize(model=model, config=models.config(stage))[0]
        phase = "forward"
        loss = engine(tokens, targets)
        phase = "backward"
        engine.backward(loss)
        phase = "step"
        engine.step()
        phase = ""
    except torch.OutOfMemoryError as error:
        text = str(error)
        assert "simulated device out of memory" in text
    if engine is not None:
        engine.destroy()
    del model, engine
    loss = None
    gc.collect()
    controls.configure("random", cap=1 << 30)
    return before, phase, text


def run_out_of_memory(stage):
    """In initialize, in forward or backward, and in step; what is left over can be destroyed, and leaves nothing."""
    controls = begin()
    failed = set()
    for room in range(8_000, 400_000, 8_000):
        before, phase, text = train_until_memory_ends(controls, stage, room)
        torch.accelerator.synchronize()
        check_order(controls)
        deadline = time.monotonic() + 10  # autograd's thread lets go of its task only after it has handed on the error
        while controls.used_bytes() != before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert controls.used_bytes() == before, (room, phase)
        if not phase:
            break
        failed.add((phase, text.partition(" bytes for ")[2].partition(" on sim:0.")[0]))
    assert not phase
    phases = {phase for phase, _ in failed}
    assert phases >= {"initialize", "forward", "backward"}
    roles = {role for _, role in failed}
    assert roles >= {"parameters", "gradients", "optimizer states"}
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_ran_out_of_memory_leaves_nothing(stage):
    run(1, run_out_of_memory, stage)


def run_out_of_memory_in_step(stage):
    """Several ranks run out: each knows what its engine holds, or which rank has ended."""
    controls = begin()
    for room in (512, 2048 if stage > 0 else 12 << 10):
        engine = deeptide.initialize(model=make_model(DEVICE), config=models.config(stage))[0]
        tokens, targets = (tensor.to(DEVICE) for tensor in models.batches(1, 2)[0])
        engine.backward(engine(tokens, targets))
        torch.accelerator.synchronize()
        controls.configure("random", cap=controls.used_bytes() + room)
        try:
            engine.step()
            raise AssertionError(f"{room} bytes were enough")
        except torch.OutOfMemoryError as error:
            assert "The engine holds" in str(error) and "of optimizer states" in str(error), error
            if stage == 0:
                assert '"zero_optimization": {"stage": ' in str(error), error
        except deeptide.CommError as error:
            assert "has ended training" in str(error), error
        controls.configure("random")
        engine.destroy()
        del engine, tokens, targets
        gc.collect()
        dist.barrier()  # the engines of all ranks have ended, and with them what a device waited for
        check_order(controls)
        assert controls.used_bytes() == 0
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_that_run_out_of_memory_in_step_can_begin_anew(stage):
    run(2, run_out_of_memory_in_step, stage)


def train_under_cap():
    """The engine's forecast is what it takes, and enough; half of it is not, and the error says for whom."""
    controls = begin()
    controls.configure("random")
    for stage, gas in ((0, 1), (1, 2), (2, 1), (3, 2)):
        model = make_model(DEVICE)
        engine = deeptide.initialize(model=model, config=models.config(stage, gas=gas))[0]
        forecast = sum(line.predicted_bytes for line in engine.memory())
        engine.destroy()
        for share in (1.05, 0.5):
            cap = {"device_memory_cap": int(share * forecast)}
            try:
                engine = deeptide.initialize(
                    model=make_model(DEVICE), config=models.config(stage, gas=gas, deeptide=cap)
                )[0]
                for tokens, targets in models.batches(3 * gas, 2):
                    engine.backward(engine(tokens.to(DEVICE), targets.to(DEVICE)))
                    engine.step()
                assert share > 1, stage
                for line in engine.memory():
                    assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02), (stage, line)
                engine.destroy()
            except torch.OutOfMemoryError as error:
                assert share < 1, (stage, error)
                assert '"deeptide": {"device_memory_cap"}' in str(error) and " bytes for " in str(error), error
                engine = None
                gc.collect()
            dist.barrier()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
def test_the_forecast_and_a_twentieth_is_enough_memory():
    run(2, train_under_cap)


def cycle_engines(cycles):
    """Streams, events, memory; the host's descriptors and threads."""
    controls = begin()
    controls.configure("random")
    inputs = [tensor.to(DEVICE) for tensor in models.batches(1, 2)[0]]

    def cycle(number):
        engine = deeptide.initialize(model=make_model(DEVICE), config=models.config(3 * (number % 2)))[0]
        engine.backward(engine(*inputs))
        engine.step()
        engine.destroy()

    def left():
        gc.collect()
        return controls.used_bytes(), controls.events(), controls.streams()

    for number in range(6):  # the pool of streams fills, and so do libraries' own workspaces
        cycle(number)
    before, on_host = left(), usage()
    for number in range(cycles):
        cycle(number)
    assert left() == before
    _, *counts = settled_usage(on_host)  # descriptors, threads, names in shared memory
    assert all(now <= then for now, then in zip(counts, on_host[1:], strict=True)), (on_host, counts)
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "cycles"), [(1, 50), (2, 6)])
def test_engines_leave_nothing_on_the_device(world, cycles):
    run(world, cycle_engines, cycles)


def cross_devices(stage, folder):
    """A run that goes from a CPU to the device and back has the states that it had, and goes on."""
    controls = begin()
    states = []
    for device in ("cpu", DEVICE, "cpu"):
        engine = deeptide.initialize(model=make_model(device), config=models.config(stage, bf16=True))[0]
        if states:
            engine.load_checkpoint(folder)
            models.assert_same(states[-1], on_host(models.everything(engine)))
        for tokens, targets in models.batches(2, 2, seed=len(states)):
            engine.backward(engine(tokens.to(device), targets.to(device)))
            assert engine.step()
        engine.save_checkpoint(folder)
        states.append(on_host(models.everything(engine)))
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


def on_host(state):
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_cross_devices(stage, tmp_path):
    run(2, cross_devices, stage, str(tmp_path))


LAYERS = 6


def phases_of(controls, engine, inputs, apart):
    """Simulated seconds of a step; of forward, backward and step() if each begins when the one before has ended."""
    marks = []

    def mark(here):
        if here:
            torch.accelerator.synchronize()
            marks.append(controls.host_time_s())

    mark(True)
    loss = engine(*inputs)
    mark(apart)
    engine.backward(loss)
    mark(apart)
    engine.step()
    mark(True)
    return [end - begin for begin, end in itertools.pairwise(marks)]


def simulated_seconds(controls, stage, live, compute, link, apart=False):
    """Seconds of a step, after others. Bandwidths in bytes/s, 0: no time. `live`: most elements gathered at a time."""
    controls.configure("late", compute=compute, link=link)
    model = models.to_device(models.make_model(layers=LAYERS, width=64, tied=False), DEVICE)
    zero = {"stage3_prefetch_bucket_size": live, "stage3_max_live_parameters": live}
    engine = deeptide.initialize(model=model, config=models.config(stage, zero=zero))[0]
    for batch in models.batches(3, MICRO):
        inputs = [tensor.to(DEVICE) for tensor in batch]
        seconds = phases_of(controls, engine, inputs, apart)
    engine.destroy()
    check_order(controls)
    return seconds


def compare_with_ideal(stage, live):
    """Compares where transfers take as long as computation in all.

    In the ideal schedule each phase takes as long as its computation or its transfers, whichever is longer, and the
    pipeline's fill: of what is shorter, one block.
    """
    controls = begin()
    compute = simulated_seconds(controls, stage, live, 1e6, 0, apart=True)
    link = simulated_seconds(controls, stage, live, 0, 1e6, apart=True)
    ratio = sum(link) / sum(compute)
    transfers = [seconds / ratio for seconds in link]
    ideal = sum(max(c, t) + min(c, t) / LAYERS for c, t in zip(compute, transfers, strict=True))
    (both,) = simulated_seconds(controls, stage, live, 1e6, 1e6 * ratio)
    print(f"stage {stage}: compute {compute}, transfers {transfers}, ideal {ideal}, reached {both}: {both / ideal:.3f}")
    assert sum(compute) < both < 1.01 * ideal, (compute, transfers, both / ideal)
    dist.destroy_process_group()


# At stage 3 all units at once, so that each is gathered once; then three blocks of six.
@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize(("stage", "live"), [(0, 0), (1, 0), (2, 0), (3, 200_000), (3, 80_000)])
def test_a_step_takes_as_long_as_its_ideal_schedule(stage, live):
    run(2, compare_with_ideal, stage, live)


def refuse_a_device_without_a_backend():
    begin()
    del dist.Backend.default_device_backend_map["sim"]
    with pytest.raises(deeptide.ConfigError, match="no backend for the device type 'sim'; import the package"):
        deeptide.initialize(model=make_model(DEVICE), config=models.config(1))


@simulated_only
def test_a_device_type_without_a_backend_is_refused():
    run(2, refuse_a_device_without_a_backend)


def train_with_states_of_16_bits(type, params, moments):
    """Packed or whole masters, and every stage, give the same bits."""
    controls = begin()
    results = []
    for stage, packed in ((0, False), (0, True), (1, True), (2, True), (3, False), (3, True)):
        controls.configure("random", max_delay_us=500, seed=stage)
        own = {"packed_states": packed, "moment_dtype": moments, "seed": 3}
        optimizer = {"type": type, "params": params}
        results.append(train(DEVICE, stage, 1, 1.0, bf16=True, deeptide=own, optimizer=optimizer))
        check_order(controls)
        assert unequal(results[0], results[-1]) == [], (stage, packed)
    on_cpu = train("cpu", 2, 1, 1.0, bf16=True, deeptide=own, optimizer=optimizer)
    tolerance = 2e-2  # one bf16 number is 2^-8 from the next, and moments that round the other way move a step
    assert far(on_cpu, results[-1], tolerance) == []
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("type", "params", "moments"),
    [
        ("AdamW", {"lr": 1e-2, "eps": 1e-5}, "bf16"),
        pytest.param("SGD", {"lr": 1e-2, "momentum": 0.9}, "bf16", marks=pytest.mark.slow),
        pytest.param("Lamb", {"lr": 1e-2}, "fp32", marks=pytest.mark.slow),  # leases masters as fp32
    ],
)
def test_states_of_16_bits_are_stepped_alike(type, params, moments):
    run(2, train_with_states_of_16_bits, type, params, moments)
