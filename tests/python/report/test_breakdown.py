# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A step's time is accounted for, and one line names what limits it: each cause is injected, and named."""

import ctypes
import json
import re
import struct
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from conftest import run_processes
from models import batches, make_model
from torch import nn

import deeptide
from deeptide import comm

BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "wall_clock_breakdown": True,
    "steps_per_print": 6,
}


def start(model=None, **extra):
    return deeptide.initialize(model=model or make_model(), config={**BASE, **extra})[0]


def train(engine, steps=6, pause=0.0, batch=None):
    for tokens, targets in [batch] * steps if batch else batches(steps, 4):
        time.sleep(pause)
        engine.backward(engine(tokens, targets))
        engine.step()


def limits(text):
    return re.findall(r"limited by ([^;\n]*)", text)


def test_lines_come_every_steps_per_print_in_deepspeeds_words(capfd):
    engine = start(steps_per_print=2, memory_breakdown=True)
    train(engine, 4)
    text = capfd.readouterr().err
    times = re.findall(r"time \(ms\) \| fwd: ([\d.]+) \| bwd: ([\d.]+) \| bwd_inner: ([\d.]+) \| bwd_allreduce: ", text)
    assert len(times) == 2 and all(float(value) > 0 for line in times for value in line)
    assert len(limits(text)) == 2
    memory = re.findall(r"memory at most \| parameters: ([\d.]+ \w+) \(forecast ([\d.]+ \w+)\)", text)
    assert len(memory) == 2 and memory[0][0] == memory[0][1] != "0 bytes"


def test_nothing_is_said_without_the_keys(capfd):
    engine = start(wall_clock_breakdown=False)
    train(engine)
    text = capfd.readouterr().err
    assert "limited by" not in text and "time (ms)" not in text and "memory at most" not in text
    assert engine.timers("fwd").elapsed() == 0


@pytest.mark.parametrize("gas", [1, 3])
def test_phases_add_up_to_the_step(gas):
    engine = start(gradient_accumulation_steps=gas)
    train(engine, 2 * gas)  # after the second, the machine is measured
    began = time.perf_counter()
    train(engine, gas)
    train(engine, gas, pause=0.01)
    passed = time.perf_counter() - began
    times = engine._core.step_times()
    assert times.total == pytest.approx(times.between + times.forward + times.backward + times.step, rel=1e-3)
    assert times.between >= 0.01 * gas and times.optimizer > 0
    assert 0.01 * gas < times.total < passed
    assert times.waiting + times.files <= times.total


def test_slow_loader_is_named():
    engine = start()
    began = time.perf_counter()
    train(engine, 1)
    train(engine, 4, pause=max(0.05, 5 * (time.perf_counter() - began)))
    line = engine.limit()
    assert line.startswith("limited by data: "), line
    assert "more workers" in line


@pytest.mark.costly
def test_slow_loader_is_named_where_the_program_calls_the_model_itself():
    """At stage 3 a rank's first gathered unit shows where its forward begins."""
    limit = run_processes(2, rank_that_calls_its_model)[0].stdout
    assert limit.startswith("limited by data"), limit


def rank_that_calls_its_model():
    engine = start(
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}, deeptide={"shared_memory": False}
    )
    longest = torch.zeros(1)
    for tokens, targets in batches(5, 4):
        time.sleep(0.1 + 3 * longest.item())  # however slow the machine is, and alike on both ranks
        began = time.perf_counter()
        engine.backward(engine.module(tokens, targets))
        engine.step()
        longest.fill_(time.perf_counter() - began)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    if engine.world.rank == 0:
        print(engine.limit())


def rank_of_two(slow, what):
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, *batch):
            if engine.world.rank == slow and what == "forward":
                time.sleep(0.1)
            return self.inner(*batch)

    engine = start(Slow(), comms_logger={"enabled": True})
    train(engine, 5, pause=0.1 if engine.world.rank == slow and what == "loader" else 0.0)
    if engine.world.rank == 0:
        print(json.dumps([engine.limit(), engine.comms_summary()]))
        comm.log_summary()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("what", ["forward", "loader"])
def test_slow_rank_is_named_with_what_it_does(slow, what):
    limit, table = json.loads(run_processes(2, rank_of_two, slow, what)[0].stdout.splitlines()[0])
    doing = "computes for" if what == "forward" else "spends "
    assert limit.startswith(f"limited by waiting for rank {slow}, which {doing}"), limit
    assert ("data loader" in limit) == (what == "loader")
    waits = dict(re.findall(r"rank (\d): waits ([\d.]+) ms", table))
    assert float(waits[str(1 - slow)]) > float(waits[str(slow)]), table


class Wide(nn.Module):
    """Little to compute for many parameters."""

    def __init__(self, width=1100, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, _):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


# A drive that takes 20 ms a transfer: a library whose reads and writes of blocks pause first.
SLOW_DRIVE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
#define PAUSED(name, memory)                                                                  \\
  ssize_t name(int file, memory* at, size_t bytes, off_t place) {                             \\
    ssize_t (*real)(int, memory*, size_t, off_t) = (void*)dlsym(RTLD_NEXT, #name);            \\
    const struct timespec pause = {0, 20 * 1000 * 1000};                                      \\
    if (bytes > 65536) nanosleep(&pause, 0);                                                  \\
    return real(file, at, bytes, place);                                                      \\
  }
PAUSED(pread, void)
PAUSED(pread64, void)
PAUSED(pwrite, const void)
PAUSED(pwrite64, const void)
"""


def deny_io_uring():
    """The kernel's own queue would pass by that library: seccomp answers ENOSYS to io_uring_setup."""
    load, jump, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 38
    code = [(load, 0, 0, 0), (jump, 0, 1, 425), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    memory = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(code), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.create_string_buffer(filters), 0, 0) == 0, ctypes.get_errno()


@pytest.mark.costly
def test_slow_drive_is_named(tmp_path):
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_DRIVE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {**BASE, "zero_optimization": {"stage": 2, "offload_optimizer": files}}
    (done,) = run_processes(1, rank_with_files, config, env={"LD_PRELOAD": str(library)})
    assert done.stdout.startswith("limited by files: "), done.stdout
    assert "nvme_path" in done.stdout


def rank_with_files(config):
    deny_io_uring()
    engine = deeptide.initialize(model=Wide(), config=config)[0]
    train(engine, 5, batch=(torch.randn(2, 1100), None))
    print(engine.limit())


class Elementwise(nn.Module):
    """Each operator moves 12 MiB and multiplies nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 1024))

    def forward(self, x, _):
        for _ in range(8):
            x = x * self.weight + x
        return x.mean()


def test_memory_bound_model_is_named():
    engine = start(Elementwise(), optimizer={"type": "SGD", "params": {"lr": 0.1}})
    train(engine, 5, batch=(torch.ones(1024, 1024), None))
    line = engine.limit()
    assert line.startswith("limited by memory:"), line
    assert re.search(r"\([\d.]+ [KMGT]iB/s of this machine's [\d.]+ [KMGT]iB/s\)", line), line


def test_model_of_large_products_is_bound_by_computing():
    model = nn.Sequential(*(nn.Linear(768, 768, bias=False) for _ in range(3)))

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, _):
            return self.inner(x).mean()

    engine = start(Products(), optimizer={"type": "SGD", "params": {"lr": 0.1}})
    train(engine, 5, batch=(torch.randn(1536, 768), None))
    line = engine.limit()
    assert line.startswith("limited by compute: computing at "), line
    assert "of this machine's measured peak" in line


def test_comms_table_counts_what_a_step_sends():
    (first, _) = run_processes(2, rank_that_counts)
    before, after, sizes = json.loads(first.stdout.splitlines()[-1])  # after the tables
    assert before and set(before) == set(after)
    steps = 4
    for operation, lines in after.items():
        for size, (count, total, mean, algorithm, bus) in lines.items():
            assert count >= before[operation].get(size, [0])[0]
            assert total >= mean > 0 and algorithm > 0
            expected = algorithm if operation in ("broadcast", "send", "receive") else algorithm / 2
            assert bus == pytest.approx(expected)

    def count(table):
        return table["all_gather"][str(sizes["gathered"])][0]

    assert steps <= count(after) - count(before) <= 2 * steps  # in forward, and in backward unless it is still there


def rank_that_counts():
    """One unit of 64 x 64 elements at stage 3, in memory that ranks do not share."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)
            self.other = nn.Linear(64, 96, bias=False)

        def forward(self, x, _):
            return self.other(self.layer(x)).mean()

    engine = start(
        One(),
        wall_clock_breakdown=False,
        comms_logger={"enabled": True},
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},
        deeptide={"shared_memory": False, "unit_size": 4096},
    )
    batch = (torch.randn(2, 64), None)
    train(engine, 2, batch=batch)
    before = comm.log_summary(return_dict=True)
    train(engine, 4, batch=batch)
    after = comm.log_summary(return_dict=True)
    if engine.world.rank == 0:
        print(json.dumps([before, after, {"gathered": 4 * 64 * 64}]))
