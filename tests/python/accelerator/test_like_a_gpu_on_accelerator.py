# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs and NCCL have what a CPU has not: kept memory, warnings, collectives that meet first or never end."""

import datetime
import gc
import os
import signal
import threading
import time
import warnings

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin, simulated_only
from conftest import run_processes
from torch import nn

import deeptide
from deeptide import _C
from deeptide._process.world import find_world

WIDTH = 256


def run(world, function, *args, **settings):
    return run_processes(world, function, *args, preload=("torch._dynamo",), **settings)


def make_engine(stage, device=DEVICE, **settings):
    model = models.to_device(models.make_model(), device)
    return deeptide.initialize(model=model, config=models.config(stage, **settings))[0]


def inputs_of(seed=0, micro=2):
    return [tensor.to(DEVICE) for tensor in models.batches(1, micro, seed=seed)[0]]


# -- collectives ---------------------------------------------------------------------------------------------------


def meet():
    """Ranks connect in initialize: later each may be where no other one waits for it."""
    controls = begin()
    for stage in (0, 1, 2, 3):
        engine = make_engine(stage)
        assert any("first collective" in wait for wait in controls.host_waits()), stage
        for seed in range(2):
            engine.backward(engine(*inputs_of(seed)))
            engine.step()
        assert [wait for wait in controls.host_waits() if "first collective" in wait] == []
        engine.destroy()
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
def test_the_first_collective_of_each_group_is_in_initialize():
    run(2, meet)


def look_at_groups():
    controls = begin()
    engine = make_engine(2, deeptide={"comm_timeout": 7})
    assert [group.bound_device_id for group in engine._process_groups] == [torch.device(DEVICE, 0)] * 2
    assert controls.timeouts == [datetime.timedelta(seconds=37)] * 2  # the engine's own wait ends before
    engine.destroy()
    world, groups = find_world(None, torch.device(DEVICE))  # as the command that times collectives does
    assert not groups  # until a channel is opened
    _C.TensorTeam(world, 2, 5.0, 1)
    assert [group.bound_device_id for group in groups] == [torch.device(DEVICE, 0)]
    dist.destroy_process_group()


@simulated_only
def test_groups_know_the_device_and_the_timeout():
    run(2, look_at_groups)


def wait_for_all():
    controls = begin()
    group = dist.new_group(backend="simulated")
    begun = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    dist.barrier(group)
    assert dist.get_rank() == 1 or time.monotonic() - begun > 0.4
    assert "barrier" in controls.host_waits()
    dist.destroy_process_group()


@simulated_only
def test_the_simulated_barrier_waits_for_all_ranks():
    run(2, wait_for_all)


def lose_a_peer():
    """Rank 1's device never begins its part, and then the process is gone: rank 0's device is in it for ever."""
    controls = begin()
    controls.configure("random", stuck="without a peer")
    engine = make_engine(2, deeptide={"comm_timeout": 3})
    first, second = inputs_of(), inputs_of(1)
    engine.backward(engine(*first))
    engine.step()
    torch.accelerator.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        controls.configure("random", stuck="always")
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(deeptide.CommError, match="step 1, step, reading the norm of the gradients"):
        engine.backward(engine(*second))
        engine.step()
    engine.destroy()
    torch.accelerator.synchronize()  # what was stuck there has been aborted
    assert time.monotonic() - begun < 20
    print("went on")


@pytest.mark.costly
@simulated_only
def test_a_peer_that_is_lost_before_the_verdict_ends_the_wait_for_the_device():
    ranks = run(2, lose_a_peer, timeout=60, check=False)
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 0, ranks[0].stderr
    assert "went on" in ranks[0].stdout


def cross_collectives(connections):
    """Two communicators, each with streams of its own, and ranks that begin with another one of them."""
    controls = begin()
    controls.configure("random", connections=connections)
    groups = [dist.new_group(backend="simulated") for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    own, main = torch.ones(4, device=DEVICE), torch.accelerator.current_stream()
    last, gathered = [], []
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        stream, there = torch.Stream(DEVICE), torch.empty(8, device=DEVICE)
        gathered.append(there)
        work = dist.all_gather_into_tensor(there, own, group=group, async_op=True)
        torch.accelerator.set_stream(stream)
        work.wait()
        last.append(stream.record_event())
        torch.accelerator.set_stream(main)
    deadline = time.monotonic() + 2
    while not (ended := all(event.query() for event in last)) and time.monotonic() < deadline:
        time.sleep(0.01)
    print("went on" if ended else "stuck", flush=True)
    dist.barrier()  # no rank ends before
    os._exit(0)


@simulated_only
@pytest.mark.parametrize(("connections", "outcome"), [(0, "went on"), (1, "stuck")])
def test_a_shared_queue_makes_collectives_in_different_order_block_each_other(connections, outcome):
    """So the simulation has what the engine must not depend on: no such order of its own, on one queue (divergence)."""
    for rank in run(2, cross_collectives, connections):
        assert outcome in rank.stdout


def read_the_loss_after_backward(stage):
    """Buckets are refilled: what follows a backward on its stream waits for reductions that the others have begun."""
    controls = begin()
    for schedule in ("random", "late_default", "late_others"):
        controls.configure(schedule, patience=20)
        engine = make_engine(stage, deeptide={"comm_timeout": 20, "unit_size": 100})
        for seed in range(3 if dist.get_rank() == 0 else 1):
            loss = engine(*inputs_of(seed))
            engine.backward(loss)
            assert loss.item() > 0
            engine.step()
        engine.join()
        engine.destroy()
        assert controls.settle() == ""
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_reads_its_loss_between_backward_and_step_though_another_has_no_more_batches(stage):
    run(2, read_the_loss_after_backward, stage)


# -- the host ------------------------------------------------------------------------------------------------------


class Product(nn.Module):
    """Its backward looks for zeros, for which the host waits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5))

    def forward(self):
        return self.weight.prod()


def warn():
    """Torch's warnings within the engine's calls are Python's: filters see them, and may make them errors."""
    controls = begin()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("warn")
    else:
        controls.configure("late", warns_of_waits=True)
    config = models.config(1, micro=1)
    engine = deeptide.initialize(model=models.to_device(Product(), DEVICE), config=config)[0]
    for act in (lambda: engine.backward(engine()), engine.step):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            act()
        assert any("synchronizing" in str(one.message) for one in seen)
    engine.backward(engine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="synchronizing"):
            engine.step()
    assert engine.global_steps == 2  # it was taken all the same
    engine.destroy()
    dist.destroy_process_group()


def test_warnings_of_torch_within_the_engine_reach_python():
    run(1, warn)


# -- memory --------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


NUMEL = 8 * WIDTH * WIDTH


def hold_gradients(bf16, expected, kernels):
    """A single rank's gradients: they themselves, or what is in the units' buckets until the step; nothing beside."""
    begin().configure("random", kernels=kernels)
    for stage in (0, 2, 3):
        config = models.config(stage, bf16=bf16)
        engine = deeptide.initialize(model=models.to_device(Layers(), DEVICE), config=config)[0]
        x = torch.ones(2, WIDTH, device=DEVICE, dtype=torch.bfloat16 if bf16 else torch.float32)
        for _ in range(3):
            engine.backward(engine(x))
            assert engine.step()
        lines = {line.role: line for line in engine.memory()}
        for role, bytes in (("gradients", expected * NUMEL), ("communication", 0)):
            assert lines[role].predicted_bytes == bytes, (stage, role, lines[role])
            assert lines[role].measured_bytes == bytes, (stage, role, lines[role])
        engine.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("bf16", "expected"), [(True, 2), (False, 4)])
def test_a_single_rank_keeps_gradients_in_the_type_they_have(bf16, expected, kernels):
    run(1, hold_gradients, bf16, expected, kernels)


class Pieces(nn.Module):
    """Four units of sixteen parameters each."""

    def __init__(self):
        super().__init__()
        block = [nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16)) for _ in range(4)]
        self.blocks = nn.ModuleList(block)


def free_what_came():
    """The parameters as they came were freed one by one; no large buffer fits there."""
    begin()
    numel = sum(p.numel() for p in Pieces().parameters())
    gc.collect()
    torch.accelerator.empty_cache()
    model = models.to_device(Pieces(), DEVICE)
    engine = deeptide.initialize(model=model, config=models.config(2, bf16=True))[0]
    kept = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    assert kept < 2 * numel or ON_GPU, (kept, numel)  # it was 4 bytes of each; a GPU keeps segments of 2 MiB
    engine.destroy()
    dist.destroy_process_group()


def test_initialize_leaves_nothing_in_the_allocator():
    run(1, free_what_came)
