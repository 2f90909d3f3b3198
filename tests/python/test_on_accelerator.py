# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine on a simulated accelerator: the CPU's bits, and no access that nothing orders."""

import gc
import os

import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes

import deeptide

STEPS, MICRO = 3, 2


def make_model(device):
    model = models.make_model().to(device)
    model.head.weight = model.embed.weight  # `to` keeps ties for the devices that torch knows
    return model


def train(device, stage, gas, clipping, bf16=False, own=False):
    """Trains this rank's part, with an optimizer of torch's if `own`; returns losses, norms and weights, on the CPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(device)
    cfg = models.config(stage, micro=MICRO, gas=gas, bf16=bf16, gradient_clipping=clipping)
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
    run_processes(world, function, *args, preload=("torch._dynamo",))  # torch's optimizers would load it in each rank


def begin():
    """As ranks that share no memory: the device's do not either."""
    os.environ["DEEPTIDE_TEST_APART"] = "1"
    import simulated

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return simulated


def unequal(expected, got):
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)]


def compare_with_cpu(stages, gas, clipping, bf16):
    """With an optimizer of torch's: our own kernels for CPUs fuse multiply-adds, which ATen's operators do not."""
    simulated = begin()
    for stage in stages:
        expected = train("cpu", stage, gas, clipping, bf16, own=True)
        simulated.configure("late_default" if stage % 2 == 0 else "late_others")
        got = train("sim", stage, gas, clipping, bf16, own=True)
        assert simulated.settle() == ""
        assert unequal(expected, got) == [], stage
    assert simulated.checked() > 1000
    dist.destroy_process_group()


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
    simulated = begin()
    on_cpu = train("cpu", 2, 1, 1.0)
    results = []
    for stage in range(4):
        simulated.configure("random", max_delay_us=1000, seed=stage)
        results.append(train("sim", stage, 1, 1.0))
        assert simulated.settle() == ""
        assert unequal(results[0], results[-1]) == [], stage
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(on_cpu, results[-1], strict=True))
    dist.destroy_process_group()


def test_all_stages_give_the_same_bits_with_adam():
    run(2, compare_stages)


def count_waits(stage):
    simulated = begin()
    simulated.configure("late")
    model = make_model("sim")
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, gas=2))
    batches = [[tensor.to("sim") for tensor in batch] for batch in models.batches(6, 2)]
    for step in range(3):
        waits = []
        for tokens, targets in batches[2 * step : 2 * step + 2]:
            simulated.host_waits()
            engine.backward(engine(tokens, targets))
            assert simulated.host_waits() == []
            outcome = engine.step()
            waits += simulated.host_waits()
        assert outcome.applied
        assert waits == ["copy_ device to host"], waits  # the squares of the norm, which tell whether all is finite
    engine.destroy()
    assert simulated.settle() == ""
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_waits_once_a_step(stage):
    run(2, count_waits, stage)


def run_out_of_memory(stage):
    """In initialize, in forward or backward, and in step; what is left over can be destroyed, and leaves nothing."""
    simulated = begin()
    tokens, targets = (tensor.to("sim") for tensor in models.batches(1, 2)[0])
    failed = set()
    for room in range(8_000, 400_000, 8_000):
        simulated.configure("random", cap=1 << 30)
        simulated.settle()
        before = simulated.used_bytes()
        model, engine, phase = make_model("sim"), None, "initialize"
        simulated.configure("random", cap=simulated.used_bytes() + room)
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
            assert "simulated device out of memory" in str(error)
            failed.add((phase, str(error).partition(" bytes for ")[2].partition(" on sim:0.")[0]))
        if engine is not None:
            engine.destroy()
        del model, engine
        loss = None
        gc.collect()
        torch.accelerator.synchronize()
        assert simulated.settle() == ""
        assert simulated.used_bytes() == before, (room, phase)
        if not phase:
            break
    assert not phase
    phases = {phase for phase, _ in failed}
    assert phases >= {"initialize", "forward", "backward"}
    roles = {role for _, role in failed}
    assert roles >= {"parameters", "gradients", "optimizer states"}
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_ran_out_of_memory_leaves_nothing(stage):
    run(1, run_out_of_memory, stage)


def simulated_seconds(simulated, stage, compute, link):
    """Of a step. Bandwidths in bytes per second, 0: no time."""
    simulated.configure("late", compute=compute, link=link)
    model = models.make_model(layers=6, width=64, tied=False).to("sim")
    zero = {"stage3_prefetch_bucket_size": 200_000, "stage3_max_live_parameters": 200_000}
    engine = deeptide.initialize(model=model, config=models.config(stage, zero=zero))[0]
    for step, (tokens, targets) in enumerate(models.batches(4, MICRO)):
        if step == 2:  # the order of units is known
            torch.accelerator.synchronize()
            begin = simulated.host_time_s()
        engine.backward(engine(tokens.to("sim"), targets.to("sim")))
        engine.step()
    torch.accelerator.synchronize()
    seconds = (simulated.host_time_s() - begin) / 2
    engine.destroy()
    assert simulated.settle() == ""
    return seconds


def overlap(stage, most):
    """`most`: of the time of a step, where all transfers take as long as all computation: 2 without overlap."""
    simulated = begin()
    compute = simulated_seconds(simulated, stage, 1e6, 0)
    link = simulated_seconds(simulated, stage, 0, 1e6)
    both = simulated_seconds(simulated, stage, 1e6, 1e6 * link / compute)
    assert compute < both < most * compute, both / compute
    dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "most"), [(2, 1.35), (3, 1.7)])
def test_transfers_overlap_computation(stage, most):
    run(2, overlap, stage, most)


def refuse_a_device_without_a_backend():
    begin()
    del dist.Backend.default_device_backend_map["sim"]
    with pytest.raises(deeptide.ConfigError, match="no backend for the device type 'sim'; import the package"):
        deeptide.initialize(model=make_model("sim"), config=models.config(1))


def test_a_device_type_without_a_backend_is_refused():
    run(2, refuse_a_device_without_a_backend)
