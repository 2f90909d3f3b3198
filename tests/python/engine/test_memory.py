# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""ZeRO's memory is what the engine counts and what the kernel does."""

import ctypes

import models
import pytest
import torch
from conftest import run_processes, run_ranks
from gated import SGD
from torch import nn

import deeptide

pytestmark = pytest.mark.apart

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BLOCKS, WIDTH, VOCAB = 6, 32, 100


class Uneven(nn.Module):
    """A wide embedding and head around small blocks: units of two sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.h:
            x = x + block(x).relu()
        return self.head(x).float().square().mean()


TOKENS = torch.arange(12).view(2, 6)


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def shard_numel(parameters, world, item):
    """Elements that a rank owns of one unit: parameters on 64-byte boundaries, the whole padded to world x 64 bytes."""
    aligned = 64 // item
    return round_up(sum(round_up(n, aligned) for n in parameters), aligned * world) // world


def expected_shards(world, item):
    units = [[VOCAB * WIDTH], *[[WIDTH * WIDTH, WIDTH]] * BLOCKS, [VOCAB * WIDTH]]
    return [shard_numel(unit, world, item) for unit in units]


def train(world, optimizer=SGD, steps=3, bf16=False, **zero):
    """The table of bytes after some steps and an evaluation, and what is live then."""
    model = models.make_model(kind=Uneven)
    cfg = models.config(3, optimizer=optimizer, bf16=bf16, zero=zero)
    engine, *_ = deeptide.initialize(model=model, config=cfg, world=world)
    for _ in range(steps):
        engine.backward(engine(TOKENS))
        engine.step()
    live = engine._core.live_gathered_bytes()
    with torch.no_grad():
        engine(TOKENS)
    lines = {line.role: (line.predicted_bytes, line.measured_bytes) for line in engine.memory()}
    peak = engine._core.peak_gathered_bytes()
    engine.destroy()
    return lines, live, peak


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("reuse", [None, 0, 2000])
@pytest.mark.parametrize("limit", [0, 1, 7000, 9000, 10**9])
def test_gathered_bytes_never_exceed_the_limit_or_the_two_largest_units(limit, reuse, world):
    zero = {"stage3_max_live_parameters": limit}
    if reuse is not None:
        zero["stage3_max_reuse_distance"] = reuse
    shards = sorted(expected_shards(world, 4))
    allowed = 4 * max(limit, world * (shards[-1] + shards[-2]))
    whole = 4 * world * sum(shards)
    for lines, live, peak in run_ranks(world, lambda w: train(w, **zero)):
        predicted, measured = lines["gathered peak"]
        assert 0 < predicted <= min(allowed, whole) + 4 * world * shards[-1]
        assert 0 < peak <= min(allowed, whole)
        # `measured` is the memory behind those units, idle buffers too. The transport's thread lets go of a buffer a
        # moment after its collective has ended: one more unit may exist then.
        assert peak <= measured <= min(allowed, whole) + 4 * world * shards[-1]
        assert live <= allowed  # a step gathers what the next forward needs first
        if limit == 10**9 and reuse is None:
            assert peak == whole


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_keeps_its_part_and_padding(world, bf16):
    numel = sum(expected_shards(world, 2 if bf16 else 4))
    parameters = numel * (2 if bf16 else 4)
    states = numel * 4 * (3 if bf16 else 2)  # bf16: and fp32 masters
    # Two ranks' rows of bf16 take as much as their sum in fp32, and stay instead of it.
    gradients = 4 * numel
    for lines, *_ in run_ranks(world, lambda w: train(w, ADAM, bf16=bf16)):
        assert lines["parameters"] == (parameters, parameters)
        assert lines["gradients"] == (gradients, gradients)
        assert lines["optimizer states"] == (states, states)


def test_padding_is_small():
    """At most 64 bytes per parameter, and 64 per rank and unit."""
    total = sum(p.numel() for p in Uneven().parameters())
    for world in (2, 3, 4):
        excess = world * sum(expected_shards(world, 4)) - total
        assert 0 <= excess <= 16 * (2 * BLOCKS + 2) + 16 * world * (BLOCKS + 2)


def resident(*lines):
    """Bytes of this process in memory, by lines of its status.

    By default without pages of files: the kernel drops those of libraries, and brings them back, as it likes. What
    malloc and the tensors' allocator keep for the next operators belongs to no tensor and is released first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    deeptide._C.release_idle_cpu_memory()
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(lines or ("RssAnon:", "RssShmem:")))


def step_and_weigh(stage, bf16):
    """Trains a model of 336 MB (fp32) in a process of its own; the growth of its RSS must be what the engine counts."""
    deeptide.init_distributed()
    torch.set_num_threads(1)
    x = torch.ones(2, 1024, dtype=torch.bfloat16 if bf16 else torch.float32)
    warm = nn.Linear(1024, 1024).to(x.dtype)  # libraries, threads and their first pages
    warm(x).float().sum().backward()
    del warm
    empty = resident()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(80)))
    plain = resident() - empty
    assert plain > 330e6
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, optimizer=ADAM, bf16=bf16))
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        assert engine.step().applied
    growth = resident() - empty
    lines = {line.role: line.measured_bytes for line in engine.memory()}
    accounted = sum(lines.values())
    text = f"RSS grew by {growth / 1e6:.1f} MB, the engine counts {accounted / 1e6:.1f} MB: {lines}"
    print(text)
    assert abs(growth - accounted) <= 0.05 * accounted, text


@pytest.mark.costly
@pytest.mark.parametrize(
    ("stage", "bf16"),
    [*(pytest.param(stage, False, marks=pytest.mark.slow) for stage in (0, 2, 3)), (3, True)],
)
def test_resident_memory_is_what_the_engine_counts(stage, bf16):
    for done in run_processes(2, step_and_weigh, stage, bf16, fresh=True):
        print(done.stdout)


def peak_growth(call):
    """Bytes by which this process's memory grows at most while `call` runs."""
    before = resident("VmRSS:")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    result = call()
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    del result
    return peak - before


def export_and_weigh(stage, shared, folder):
    """Rank 0 holds or writes the state of a model of 67 MB; the other ranks hold no more than a few units of it."""
    deeptide.init_distributed()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    size = sum(p.nbytes for p in model.parameters())
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    cfg = models.config(stage, optimizer=SGD, zero=zero, deeptide={"shared_memory": shared})
    engine, *_ = deeptide.initialize(model=model, config=cfg)
    calls = {
        "clone": engine.module_state_dict,
        "clone on rank 0": lambda: engine.module_state_dict(only_rank=0),
        "export": lambda: engine.save_16bit_model(folder),
    }
    for call in calls.values():
        call()  # what is in memory after the first time is not the second one's
    growth = {name: peak_growth(call) / size for name, call in calls.items()}
    print(growth)
    assert growth["clone"] > 0.9, growth  # so that this measures clones
    assert growth["clone on rank 0"] > 0.9 if engine.global_rank == 0 else growth["clone on rank 0"] < 0.5, growth
    assert growth["export"] < 0.5, growth
    engine.destroy()


@pytest.mark.costly
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("stage", [0, 3])
def test_exports_clone_the_model_on_rank_0_only(stage, shared, tmp_path):
    for done in run_processes(2, export_and_weigh, stage, shared, str(tmp_path), fresh=True):
        print(done.stdout)
