# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host share memory: the same numbers as without, whatever is written where and whoever dies."""

import functools
import gc
import os
import time

import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide

STEPS = 3


def start(world, shared, stage=3, gas=1, bf16=False, **extra):
    model = models.make_model()
    model.h[0].norm.weight.requires_grad_(False)
    runtime = {"comm_timeout": 60, "shared_memory": shared, **extra.pop("deeptide", {})}
    config = models.config(stage, gas=gas, bf16=bf16, deeptide=runtime, **extra)
    return deeptide.initialize(model=model, config=config, world=world)[0]


def train(engine, first=0, last=STEPS, after_step=None):
    rank, world, gas = engine.world.rank, engine.world.size, engine.gradient_accumulation_steps()
    losses, norms = [], []
    for step in range(first, last):
        tokens, targets = models.batches(last, 2 * gas * world)[step]
        for micro in range(gas):
            part = slice(2 * (micro * world + rank), 2 * (micro * world + rank + 1))
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            outcome = engine.step()
            losses.append(loss.item())
        assert outcome.applied
        norms.append(outcome.grad_norm)
        if after_step:
            after_step(engine.module, step)
    return losses, norms


def state_of(engine):
    """Parameters and what the optimizer holds for them, whole. Collective."""
    state = dict(engine.module_state_dict())
    for name in list(state):
        for role in ("master", "exp_avg", "exp_avg_sq"):
            state[f"{name}/{role}"] = engine._core.full_state(name, role)
    return {name: value for name, value in state.items() if value is not None}


def run(world, shared, *args, after_step=None, **kwargs):
    engine = start(world, shared, *args, **kwargs)
    numbers = train(engine, after_step=after_step)
    state = state_of(engine)
    engine.destroy()
    return *numbers, state


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    for name, value in one[2].items():
        assert torch.equal(value, other[2][name]), name


def assert_all_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert_same(one, other)


@functools.cache
def apart(world, *args):
    return run_ranks(world, run, False, *args)


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("world", "stage", "gas"),
    [(2, stage, gas) for stage in range(4) for gas in (1, 3)] + [(4, 0, 3), (4, 1, 1), (4, 2, 1), (4, 3, 3), (8, 3, 1)],
)
def test_numbers_are_those_of_ranks_apart(world, stage, gas, bf16):
    assert_all_same(run_ranks(world, run, True, stage, gas, bf16), apart(world, stage, gas, bf16))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("world", "stage", "gas"), [(1, 2, 1), (1, 2, 3), (2, 3, 1), (2, 1, 3), (3, 2, 1)])
def test_a_thread_of_its_own_for_the_sums_changes_no_bit(world, stage, gas, bf16, shared):
    def with_thread(place, mode):
        return run(place, shared, stage, gas, bf16, deeptide={"reduce_thread": mode})

    assert_all_same(run_ranks(world, with_thread, "on"), run_ranks(world, with_thread, "off"))


def backward_twice(world, shared, bf16, thread, together=False):
    """Two losses before each step; rows that were kept for it become sums after all."""
    engine = start(world, shared, stage=2, bf16=bf16, deeptide={"reduce_thread": thread})
    norms = []
    for step in range(STEPS):
        tokens, targets = models.batches(STEPS, 4 * world.size)[step]
        parts = [slice(2 * (i * world.size + world.rank), 2 * (i * world.size + world.rank + 1)) for i in range(2)]
        losses = [engine(tokens[part], targets[part]) for part in parts]
        for loss in [sum(losses)] if together else losses:
            engine.backward(loss)
        norms.append(engine.step().grad_norm)
    state = state_of(engine)
    engine.destroy()
    return [], norms, state


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_second_backward_adds_to_what_was_kept_for_the_step(world, bf16):
    expected = run_ranks(world, backward_twice, False, bf16, "off")
    for shared, thread in [(True, "off"), (True, "on"), (False, "on")]:
        assert_all_same(run_ranks(world, backward_twice, shared, bf16, thread), expected)
    at_once = run_ranks(world, backward_twice, False, bf16, "off", True)[0]
    # bf16: two roundings of 2^-9 instead of one; fp32: another order of additions.
    for one, other in zip(expected[0][1], at_once[1], strict=True):
        assert one == pytest.approx(other, rel=2e-2 if bf16 else 1e-5)


def on_hosts(world, hosts, *args):
    placed = deeptide.make_world(world.store, world.rank, world.size, f"host {hosts[world.rank]}")
    engine = start(placed, True, *args)
    summary = engine.summary()
    numbers = train(engine)
    state = state_of(engine)
    engine.destroy()
    return *numbers, state, summary


@pytest.mark.parametrize(
    ("hosts", "talk"),
    [
        ([0, 0, 1, 1], "2 hosts of 2 ranks, shared memory within"),
        ([0, 1, 0, 1], "2 hosts of 2 ranks, shared memory within"),
        ([0, 0, 0, 1], "2 hosts of 3 and 1 ranks, network"),
    ],
)
@pytest.mark.parametrize(("stage", "gas", "bf16"), [(3, 3, True), (1, 1, False)])
def test_hosts_of_several_ranks_train_alike(stage, gas, bf16, hosts, talk):
    results = run_ranks(4, on_hosts, hosts, stage, gas, bf16)
    assert all(f"hosts: {talk}\n" in result[3] for result in results), results[0][3]
    assert_all_same([result[:3] for result in results], apart(4, stage, gas, bf16))


def both_ways_in_processes(cases):
    deeptide.init_distributed()
    for case in cases:
        assert_same(run(None, True, *case), run(None, False, *case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(
            2,
            [[stage, gas, bf16] for stage in range(4) for gas in (1, 3) for bf16 in (False, True)],
            marks=pytest.mark.slow,
        ),
        (4, [[0, 1, True], [3, 3, False]]),
    ],
)
def test_processes_share_as_threads_do(world, cases):
    run_processes(world, both_ways_in_processes, cases)


# -- parameters that the program writes -------------------------------------------------------------------------------


@torch.no_grad()
def multiply(model, step):
    for p in model.parameters():
        p.mul_(0.9)


@torch.no_grad()
def write_some(model, step):
    """One parameter wholly, a few elements of another: most ranks' slices do not hold them."""
    model.h[1].up.bias.copy_(torch.linspace(-1, 1, model.h[1].up.bias.numel()))
    model.h[2].down.weight[3, 5:7] = 0.25
    model.h[0].norm.weight.add_(0.5)  # frozen


@torch.no_grad()
def write_what_is_there(model, step):
    for p in model.parameters():
        p.copy_(p.clone())


def load_state(model, step):
    model.load_state_dict({name: value * 1.01 - 0.001 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("write", [multiply, write_some, write_what_is_there, load_state])
def test_writes_to_parameters_count_as_they_do_apart(write, bf16):
    shared, separate = (
        run_ranks(2, functools.partial(run, shared=shared, stage=1, bf16=bf16, after_step=write))
        for shared in (True, False)
    )
    assert_all_same(shared, separate)
    if write is not write_what_is_there:
        assert shared[0][0] != apart(2, 1, 1, bf16)[0][0], "the writes count"


def write_through_numpy(model, step):
    model.embed.weight.detach().numpy()[3] += 0.5


def write_through_data(model, step):
    model.h[1].up.weight.data[2:5] *= -1


def swap_in_memory(model, step):
    """Through storage that torch knows nothing of."""
    model.h[0].down.bias.untyped_storage()[5] = 63


@pytest.mark.parametrize("write", [write_through_numpy, write_through_data, swap_in_memory])
def test_writes_that_torch_does_not_see_count_as_they_do_apart(write):
    shared, separate = (
        run_ranks(2, functools.partial(run, shared=shared, stage=2, after_step=write)) for shared in (True, False)
    )
    assert_all_same(shared, separate)
    assert shared[0][0] != apart(2, 2, 1, False)[0][0]


def write_unseen_in_bf16(world):
    """Masters follow what was written, and keep their further bits elsewhere."""
    engine = start(world, True, bf16=True)
    train(engine)
    before = state_of(engine)
    engine.module.h[1].up.weight.data[7] = 0.5
    for group in range(engine._core.num_groups()):
        values = engine._core.hyperparameters(group)
        values["lr"] = 0.0
        engine._core.set_hyperparameters(group, values)
    train(engine, 0, 1)
    after = state_of(engine)
    for name in before:
        if not name.endswith("/master"):
            continue
        written = name == "h.1.up.weight/master"
        rest = [i for i in range(len(before[name])) if not (written and i == 7)]
        assert torch.equal(before[name][rest], after[name][rest]), name
        assert not torch.equal(after[name], after[name].bfloat16().float()), name
    assert torch.equal(after["h.1.up.weight/master"][7], torch.full((20,), 0.5))
    engine.destroy()


def test_a_write_in_bf16_leaves_the_other_masters_as_they_were():
    run_ranks(2, write_unseen_in_bf16)


def see_own_writes(world):
    engine = start(world, True)
    p = engine.module.h[0].up.bias
    p.data.fill_(world.rank + 1.0)
    assert torch.equal(p, torch.full_like(p, world.rank + 1.0)), "what this rank wrote"
    tokens, targets = models.batches(1, 2)[0]
    engine.backward(engine(tokens, targets))
    optimizer_values = engine.module_state_dict()["h.0.up.bias"]
    engine.step()
    engine.destroy()
    return optimizer_values


def test_ranks_that_write_differently_end_with_each_ranks_slice():
    """Each rank's slice comes from itself, as it does apart after a step."""
    one, other = run_ranks(2, see_own_writes)
    assert torch.equal(one, other)
    assert set(one.tolist()) <= {1.0, 2.0}


# -- engines that come and go -----------------------------------------------------------------------------------------


def resume(world, folder, first, second):
    whole = run(world, first, gas=1)
    engine = start(world, first)
    numbers = train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(world, second)
    engine.module.h[0].up.bias.detach().clone()
    engine.load_checkpoint(folder)
    more = train(engine, 2, STEPS)
    assert (numbers[0] + more[0], numbers[1] + more[1]) == whole[:2]
    state = state_of(engine)
    engine.destroy()
    assert_same(([], [], state), ([], [], whole[2]))


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_are_the_same_both_ways(first, second, tmp_path):
    run_ranks(2, resume, str(tmp_path), first, second)


def use_after_destroy(world):
    engine = start(world, True)
    train(engine)
    model = engine.module
    state = engine.module_state_dict()
    engine.destroy()
    del engine
    gc.collect()
    for name, p in model.named_parameters():
        assert torch.equal(p, state[name])
    model.embed.weight.detach().numpy()[0] += 1
    loss = model(*models.batches(1, 2)[0])
    loss.backward()
    assert model.embed.weight.grad is not None
    engine = deeptide.initialize(model=model, config=models.config(3, deeptide={"shared_memory": True}), world=world)[0]
    train(engine)
    engine.destroy()


def test_parameters_stay_usable_when_the_engine_is_destroyed():
    run_ranks(2, use_after_destroy)


def two_engines(world, shared):
    engines = [start(world, shared, stage) for stage in (2, 3)]
    numbers = [train(engine, step, step + 1) for step in range(STEPS) for engine in engines]
    states = [state_of(engine) for engine in engines]
    engines[0].destroy()
    numbers.append(train(engines[1], STEPS, STEPS + 1))
    engines[1].destroy()
    return numbers, states[0].keys(), {f"{i}/{name}": v for i, state in enumerate(states) for name, v in state.items()}


def test_two_engines_share_apart_from_each_other():
    assert_all_same(run_ranks(2, two_engines, True), run_ranks(2, two_engines, False))


class EmptyParameter(models.TinyModel):
    def __init__(self):
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.float64), requires_grad=False)
        self.nothing_trained = torch.nn.Parameter(torch.empty(0))


def hold_nothing(world):
    engine = deeptide.initialize(
        model=models.make_model(kind=EmptyParameter),
        config=models.config(3, deeptide={"shared_memory": True}),
        world=world,
    )[0]
    train(engine)
    assert engine.module_state_dict()["nothing"].shape == (0, 3)
    engine.destroy()


def test_a_parameter_of_no_elements_is_no_trouble():
    run_ranks(2, hold_nothing)


def start_with_a_bad_model(world):
    model = models.make_model()
    if world.rank == 1:
        model.h[0].up.weight = torch.nn.Parameter(model.h[0].up.weight.to("meta"))
    begin = time.monotonic()
    with pytest.raises(ValueError if world.rank == 1 else deeptide.CommError) as error:
        deeptide.initialize(model=model, config=models.config(3, deeptide={"shared_memory": True}), world=world)
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_fails_in_initialize_is_not_waited_for():
    results = run_ranks(2, start_with_a_bad_model)
    assert "rank 1 failed in initialize" in results[0][0], results[0][0]
    assert results[0][1] < 15


def usage():
    gc.collect()
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:deeptide" in line for line in maps)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return shared, len(os.listdir("/proc/self/fd")), resident


def test_cycles_leave_nothing():
    before = None
    for cycle in range(25):
        run_ranks(2, run, True)
        if cycle == 4:
            before = usage()
    after = usage()
    assert after[0] == before[0] == 0
    assert after[1] <= before[1]
    assert after[2] - before[2] < 16 * 2**20
    assert not [name for name in os.listdir("/dev/shm") if "deeptide" in name]
