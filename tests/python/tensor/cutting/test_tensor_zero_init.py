# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models that are built under zero.Init are cut while their weights pass by: no rank has a whole one."""

import json
import threading

import cut
import models
import pytest
import torch
from conftest import run_processes, run_ranks
from torch import nn

import deeptide
from deeptide.tensor import make_team
from deeptide.tensor.cutting.slices import Slice, cut_parameter

_seeding = threading.Lock()


def made(world, settings, is_deferred):
    sizes = {"vocab": 301, "width": 96}  # weights of 64 KiB and more are deferred
    with deeptide.zero.Init(enabled=is_deferred):
        model = models.make_model(**sizes)
    assert deeptide._C.is_deferred(model.h[0].up.weight) == is_deferred
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    losses, norms = cut.steps(engine, cut.STEPS)
    return losses, norms, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_its_memory_is_cut_weight_by_weight(stage):
    shared = run_ranks(2, made, cut.config(stage, 2), True)
    whole = run_ranks(1, made, cut.config(stage, 1), False)[0]
    cut.near(shared[0][0], whole[0], 1e-5, "losses")
    cut.near(shared[0][1], whole[1], 1e-4, "norms")
    assert {name: value.shape for name, value in shared[0][2].items()} == {
        name: value.shape for name, value in whole[2].items()
    }


def normal(weight):
    nn.init.normal_(weight, std=0.02)


def truncated(weight):
    nn.init.trunc_normal_(weight, std=0.02)


def with_padding(weight):
    nn.init.normal_(weight)
    with torch.no_grad():
        weight[3].zero_()


def by_rows(weight):
    for row in weight.unbind(0):
        nn.init.normal_(row)


def orthogonal(weight):
    nn.init.orthogonal_(weight)


def cut_one(world, shape, slice_, initialise, dtype, is_deferred):
    """This rank's slice. The ranks draw other numbers, and the first rank's count."""
    team = make_team(2, world, 60.0)
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(7 if is_deferred or world.rank == 0 else 8)
        with deeptide.zero.Init(enabled=is_deferred):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(shape))
            initialise(layer.weight)
            layer.to(dtype)
    if not is_deferred:
        team.core.broadcast(layer.weight.data, "start")
    cut_parameter(layer, "weight", slice_, team)
    assert not deeptide._C.is_deferred(layer.weight)
    return layer.weight.detach().clone()


@pytest.mark.parametrize(
    ("initialise", "dtype"),
    [
        *((initialise, torch.float32) for initialise in (normal, truncated, with_padding, by_rows, orthogonal)),
        (truncated, torch.bfloat16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize(
    ("shape", "slice_"),
    [
        ((4100, 512), Slice(0, (4100,))),
        ((301, 400), Slice(0, (301,))),  # padded
        ((3 * 700, 256), Slice(0, (700, 700, 700))),
        ((3000, 512), Slice(1, (512,))),
        ((300, 600), Slice(-1, (200, 200, 200))),
        ((64, 32, 48), Slice(1, (32,))),
    ],
    ids=str,
)
def test_slices_have_the_bits_of_whole_weights(shape, slice_, initialise, dtype):
    if initialise is orthogonal and len(shape) > 2:
        shape, slice_ = (64, 32 * 48), Slice(1, (32 * 48,))
    plain = run_ranks(2, cut_one, shape, slice_, initialise, dtype, False)
    deferred = run_ranks(2, cut_one, shape, slice_, initialise, dtype, True)
    for mine, expected in zip(deferred, plain, strict=True):
        assert mine.dtype == expected.dtype == dtype
        assert torch.equal(mine, expected)


SIDE = 8192  # a weight of 256 MiB


def peak_of_a_cut():
    """Prints the MiB that building a weight and cutting it add to this process's peak."""
    world = deeptide.init_distributed()
    team = make_team(2, world, 60.0)
    warm = torch.ones(1 << 20)
    team.core.broadcast(warm, "start")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))

    before = peak()
    with deeptide.zero.Init():
        layer = nn.Linear(SIDE, SIDE, bias=False)
    built = peak()
    cut_parameter(layer, "weight", Slice(0, (SIDE,)), team)
    print(json.dumps([built - before, peak() - before, list(layer.weight.shape)]))


@pytest.mark.apart
@pytest.mark.slow
def test_no_rank_has_a_whole_weight():
    for process in run_processes(2, peak_of_a_cut, fresh=True):
        built, cut_too, shape = json.loads(process.stdout)
        slice_ = SIDE * SIDE * 4 >> 21
        assert shape == [SIDE // 2, SIDE]
        assert built < 40, "some MiB of it, drawn; some of torch's at first use"
        assert cut_too < slice_ + 64, "the slice, and some MiB that pass by"
