# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU allocator that `initialize` installs: it keeps pages, says what it holds, and is no part of the numbers."""

import resource

import models
import pytest
import torch
from conftest import run_processes
from torch import nn

import deeptide
from deeptide import _C

LARGE = 1 << 20  # elements


def initialize(**extra):
    return deeptide.initialize(model=models.make_model(), config={**models.config(0), **extra})[0]


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def check_opt_out():
    deeptide.init_distributed()
    kept = torch.ones(LARGE)
    engine = initialize(deeptide={"tune_allocator": False})
    tensor = torch.ones(LARGE)
    assert _C.cpu_allocator_stats().in_use_bytes == 0
    initialize()
    other = torch.ones(LARGE)
    assert _C.cpu_allocator_stats().in_use_bytes == 4 * LARGE
    assert kept.sum() == tensor.sum() == other.sum() == LARGE
    del kept, tensor
    assert _C.cpu_allocator_stats().in_use_bytes == 4 * LARGE
    engine.destroy()
    assert other.sum() == LARGE


def test_installs_the_allocator_unless_told_not_to():
    run_processes(1, check_opt_out)


def check_faults():
    """Activations of two sizes in turn, as of training and evaluation: no pages are faulted after the first rounds."""
    deeptide.init_distributed()
    torch.set_num_threads(1)
    engine = initialize()
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    inputs = [torch.ones(rows, 512) for rows in (512, 2048)]

    def rounds(count):
        for _ in range(count):
            for x in inputs:
                layers(x).sum().backward()
                layers.zero_grad()

    rounds(3)
    before, held = faults(), _C.cpu_allocator_stats()
    rounds(20)
    after = _C.cpu_allocator_stats()
    # 40 passes over more than 30 MB of activations are 300,000 pages.
    assert faults() - before < 2000
    assert after.peak_bytes == held.peak_bytes
    assert after.in_use_bytes + after.idle_bytes <= 1.25 * held.peak_bytes + 64 * 2**20
    engine.destroy()
    assert _C.cpu_allocator_stats().idle_bytes < 16 * 2**20


@pytest.mark.costly
def test_faults_no_pages_after_the_first_steps():
    run_processes(1, check_faults)


def check_workers():
    """Processes forked from this one get its tensors and give back their own; the profiler sees large blocks too."""
    deeptide.init_distributed()
    engine = initialize()
    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].repeat(1, LARGE // 8))
    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        assert sum(float(batch[:, 0].sum()) for (batch,) in loader) == sum(range(64))
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.ones(LARGE).add(1)
    assert any(event.self_cpu_memory_usage >= 4 * LARGE for event in profile.events())
    engine.destroy()


def test_serves_forked_workers_and_the_profiler():
    run_processes(1, check_workers)


def check_error():
    deeptide.init_distributed()
    initialize()
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 50)


def test_out_of_memory_is_torchs_error():
    run_processes(1, check_error)
