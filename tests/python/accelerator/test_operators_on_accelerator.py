# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A head's loss on an accelerator: torch's values, without all logits in memory, and without a wait of the host."""

import pytest
import torch
from accelerated import DEVICE, ON_GPU, begin
from test_on_accelerator import check_order, run
from torch.nn import functional as F

from deeptide import ops

WIDTH = 16


def given(rows, classes, dtype, seed=0):
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(rows, WIDTH), torch.randn(classes, WIDTH) / 4, torch.randn(classes)
    targets = torch.randint(0, classes, (rows,))
    targets[::3] = -100
    return [hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets]


def of_torch(hidden, weight, targets, ignore_index, reduction, label_smoothing, bias):
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def results(loss_of, device, tensors, *settings):
    hidden, weight, bias = (t.detach().to(device).requires_grad_() for t in tensors[:3])
    loss = loss_of(hidden, weight, tensors[3].to(device), -100, *settings, bias)
    (3 * loss).backward()
    return [loss.detach(), hidden.grad, weight.grad, bias.grad]


def check(got, expected, tolerance):
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        error = (mine.cpu().double() - theirs.double()).norm()
        assert error <= tolerance * theirs.double().norm(), (error, theirs.double().norm())


def compare_with_torch(name):
    dtype = getattr(torch, name)
    controls = begin()
    controls.configure("random", max_delay_us=300)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    tensors = given(60, 50, dtype)
    for settings in (("mean", 0.0), ("sum", 0.0), ("mean", 0.1), ("sum", 0.2)):
        got = results(ops.linear_cross_entropy, DEVICE, tensors, *settings)
        if not ON_GPU:
            check_order(controls)
        check(got, results(of_torch, "cpu", tensors, *settings), tolerance)
    tensors[3].fill_(-100)
    got = results(ops.linear_cross_entropy, DEVICE, tensors, "mean", 0.0)
    assert got[0].isnan(), "a mean over no rows is NaN, as torch's"
    assert results(ops.linear_cross_entropy, DEVICE, tensors, "sum", 0.0)[0] == 0


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_heads_loss_is_torchs(name):
    run(1, compare_with_torch, name)


def take_chunks():
    """302 MB of logits are two chunks."""
    controls = begin()
    tensors = given(1500, 50304, torch.float32)
    expected = results(of_torch, "cpu", tensors, "mean", 0.0)
    results(ops.linear_cross_entropy, DEVICE, given(60, 50, torch.float32), "mean", 0.0)  # libraries begin
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    on_device = [t.detach().to(DEVICE) for t in tensors]
    controls.host_waits()
    got = results(ops.linear_cross_entropy, DEVICE, on_device, "mean", 0.0)
    waits = controls.host_waits()
    assert waits == [], waits
    torch.accelerator.synchronize()
    logits = 4 * 1500 * 50304
    assert torch.accelerator.max_memory_allocated() - before < 2.2 * logits  # torch's: 3, and more
    check(got, expected, 1e-5)


@pytest.mark.costly
def test_a_heads_loss_keeps_no_logits_and_the_host_waits_for_nothing():
    run(1, take_chunks)
