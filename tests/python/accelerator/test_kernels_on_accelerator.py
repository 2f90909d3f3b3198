# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine with the kernels for GPUs, which the simulated accelerator runs too: a CPU engine's bits, in few bytes.

At one rank no bucket is filled: the kernels read gradients where autograd left them.
"""

import gc

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, begin, simulated_only
from test_on_accelerator import check_order, far, run, train, unequal
from torch import nn

import deeptide

pytestmark = simulated_only
WIDTH, LAYERS = 128, 3


# -- numbers -------------------------------------------------------------------------------------------------------


def compare_with_cpu(stages, gas, clipping, bf16, type, params, own):
    """Kernels for GPUs have the bits of a CPU's, which fuse multiply-adds where ATen's operators do not."""
    controls = begin()
    extra = {"optimizer": {"type": type, "params": params}, "deeptide": own}
    for stage in stages:
        expected = train("cpu", stage, gas, clipping, bf16, **extra)
        for schedule in ("late_default", "late_others", "random"):
            controls.configure(schedule, max_delay_us=300, kernels=True)
            controls.traffic()
            got = train(DEVICE, stage, gas, clipping, bf16, **extra)
            check_order(controls)
            seen = controls.traffic()
            assert ("lamb kernel" if type == "Lamb" else "step kernel") in seen and "sum kernel" in seen, seen
            if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
                assert unequal(expected, got) == [], (stage, schedule)
            assert far(expected, got, 2e-2 if bf16 else 1e-4) == [], (stage, schedule)
    dist.destroy_process_group()


NARROW = {"packed_states": True, "moment_dtype": "bf16", "seed": 3}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "clipping", "bf16", "type", "params"),
    [
        (1, 1, 1.0, True, "AdamW", {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}),
        (1, 1, 0.01, False, "SGD", {"lr": 1e-2, "momentum": 0.9}),
        (1, 2, 1.0, True, "AdamW", {"lr": 1e-2, "eps": 1e-5}),
        (2, 1, 1.0, True, "AdamW", {"lr": 1e-2, "eps": 1e-5}),
        pytest.param(1, 1, 0.01, True, "Lion", {"lr": 1e-3}, marks=pytest.mark.slow),
        pytest.param(1, 1, 0.01, False, "Adagrad", {"lr": 1e-2}, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_the_bits_of_a_cpu_engine(world, gas, clipping, bf16, type, params):
    run(world, compare_with_cpu, [0, 2, 3], gas, clipping, bf16, type, params, {})


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "type", "params", "own"),
    [
        (1, 1, "AdamW", {"lr": 1e-2, "eps": 1e-5}, NARROW),
        (2, 1, "AdamW", {"lr": 1e-2, "eps": 1e-5}, NARROW),  # rows of ranks are summed first
        (1, 1, "Lamb", {"lr": 1e-2}, {}),
        pytest.param(2, 2, "AdamW", {"lr": 1e-2, "eps": 1e-5}, {"packed_states": True}, marks=pytest.mark.slow),
        pytest.param(1, 2, "SGD", {"lr": 1e-2, "momentum": 0.9}, NARROW, marks=pytest.mark.slow),
        pytest.param(1, 1, "AdamW", {"lr": 1e-2}, {"moment_dtype": "bf16", "seed": 3}, marks=pytest.mark.slow),
        pytest.param(2, 1, "Lamb", {"lr": 1e-2}, {"packed_states": True}, marks=pytest.mark.slow),  # leases fp32 ones
        pytest.param(1, 1, "Muon", {"lr": 1e-2, "use_muon": False}, {}, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_narrow_states_and_of_lamb_give_the_bits_of_a_cpu_engine(world, gas, type, params, own):
    run(world, compare_with_cpu, [0, 3], gas, 1.0, True, type, params, own)


def train_without_step_kernel(type, params):
    """Readers of the gradient other than the step's kernel join its pieces."""
    controls = begin()
    optimizer = {"type": type, "params": params}
    results = []
    for kernels in (False, True):
        controls.configure("random", kernels=kernels)
        results.append(train(DEVICE, 2, 1, 0.01, True, optimizer=optimizer))
        check_order(controls)
    assert far(*results, 1e-5) == []
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("type", "params"), [("Lamb", {"lr": 1e-2}), pytest.param("Muon", {"lr": 1e-2}, marks=pytest.mark.slow)]
)
def test_rules_without_a_kernel_join_the_pieces(type, params):
    run(1, train_without_step_kernel, type, params)


class Odd(nn.Module):
    """Parameters whose gradients cannot stay where they are, or not always: each is of another kind."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.plain = nn.Linear(33, 7)
        self.table = nn.Embedding(11, 33)
        self.expanded = nn.Parameter(torch.full((7,), 0.5))
        self.kept = nn.Parameter(torch.linspace(-1, 1, 7))
        self.unused = nn.Parameter(torch.ones(40))
        self.empty = nn.Parameter(torch.empty(0))
        self.kept.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad))

    def forward(self, indices):
        y = self.plain(self.table(indices)) * self.kept
        return y.float().square().mean() + (self.expanded.expand(3, 7) * 2).sum() * 0.01


def train_odd(device, backwards):
    model = models.to_device(models.make_model(kind=Odd), device)
    engine = deeptide.initialize(model=model, config=models.config(2))[0]
    results = []
    for step in range(3):
        for part in range(backwards):
            loss = engine(torch.tensor([step, part, 5, step]).to(device))
            engine.backward(loss)
        for gradient in engine.module.seen:
            gradient.zero_()  # its owner may do what it likes with it
        engine.module.seen.clear()
        outcome = engine.step()
        results += [loss.detach().cpu(), torch.tensor(outcome.grad_norm)]
    results += [engine._core.full_state(name, "master").cpu() for name, _ in engine.module.named_parameters()]
    engine.destroy()
    return results


def compare_odd():
    controls = begin()
    for backwards in (1, 2):
        expected = train_odd("cpu", backwards)
        for schedule in ("late_default", "late_others"):
            controls.configure(schedule, kernels=True)
            got = train_odd(DEVICE, backwards)
            check_order(controls)
            assert far(expected, got, 1e-5) == [], (backwards, schedule, expected, got)
    dist.destroy_process_group()


def test_gradients_that_cannot_stay_where_they_are():
    """Expanded, empty, missing, and those that the program has too and changes before the step."""
    run(1, compare_odd)


# -- bytes ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))))


class Layers(nn.Module):
    """Units of several parameters, of which one launch takes all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traffic_of(controls, act):
    """Tasks and bytes, by name."""
    torch.accelerator.synchronize()
    controls.traffic()
    act()
    torch.accelerator.synchronize()
    return controls.traffic()


def total(traffic):
    return sum(bytes for _, bytes in traffic.values())


def make_engine(stage, bf16, keeps, own):
    """An engine, and what the program has kept of its gradients, if it does."""
    cfg = models.config(stage, bf16=bf16, gradient_clipping=1.0, deeptide=own)
    engine = deeptide.initialize(model=models.to_device(Layers(), DEVICE), config=cfg)[0]
    kept = []
    for p in engine.module.parameters() if keeps else ():
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    return engine, kept


def train_once(engine, x):
    engine.backward(engine(x))
    engine.step()


def count_bytes(bf16, keeps, own):
    """Bytes of a step beside those of plain torch's forward and backward: of each parameter, and of tasks."""
    controls = begin()
    dtype = torch.bfloat16 if bf16 else torch.float32
    numel = sum(p.numel() for p in Layers().parameters())
    plain = models.to_device(Layers().to(dtype), DEVICE)
    x = torch.ones(2, WIDTH, device=DEVICE, dtype=dtype)
    beside = total(traffic_of(controls, lambda: plain(x).backward()))
    for kernels in (False, True):
        controls.configure("random", kernels=kernels)
        for stage in (0, 2, 3):
            engine, kept = make_engine(stage, bf16, keeps, own)
            train_once(engine, x)
            kept.clear()
            seen = traffic_of(controls, lambda engine=engine: train_once(engine, x))
            each = (total(seen) - beside) / numel
            print(
                f"kernels {kernels}, stage {stage}: {each:.2f} bytes, {sum(n for n, _ in seen.values())} tasks, {seen}"
            )
            if kernels:
                check_bytes(each, bf16, keeps, own, seen)
            engine.destroy()
            gc.collect()
    dist.destroy_process_group()


def check_bytes(each, bf16, keeps, own, seen):
    """AdamW reads gradient, master and moments, writes master, moments and a rounded parameter; the norm reads again.

    What the program keeps is copied into a bucket. A packed master is 4 bytes and a bit, with the parameter.
    """
    item = 2 if bf16 else 4
    least = 2 * item + 6 * 4 + (2 if bf16 else 0) + (2 * item if keeps else 0)
    if own:
        least = 2 * item + 2 * (4 + 1 / 8) + 2 * 2 * 2
    assert least <= each < least + 0.1, (each, least, seen)
    for kernel in ("step kernel", "sum kernel"):
        assert seen[kernel][0] == LAYERS, (kernel, seen)  # launches: one for each unit


@pytest.mark.parametrize(
    ("bf16", "keeps", "own"), [(True, False, {}), (False, False, {}), (True, True, {}), (True, False, NARROW)]
)
def test_bytes_of_a_step_at_one_rank(bf16, keeps, own):
    """30 of each parameter in bf16; 20 with packed masters and moments in bf16."""
    run(1, count_bytes, bf16, keeps, own)
