# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""overlap_publish: step() returns while parameters are on their way, and a program never sees a mixture."""

import contextlib
import copy
import ctypes
import functools
import io
import json
import os
import pickle
import signal
import sys

import models
import numpy
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide import utils, zero

pytestmark = pytest.mark.apart

STEPS = 3
LAST = "norm.bias"  # in the unit that arrives last


def start(world, stage=2, overlap=True, kind=models.TinyModel, optimizer=None, **extra):
    model = models.make_model(kind=kind)
    config = models.config(stage, deeptide={"overlap_publish": overlap, **extra.pop("deeptide", {})}, **extra)
    if optimizer is not None:
        optimizer = optimizer(model.parameters())
    return deeptide.initialize(model=model, optimizer=optimizer, config=config, world=world)[0]


def step(engine, number=0):
    rank, size = engine.world.rank, engine.world.size
    tokens, targets = models.batches(number + 1, 2 * size)[number]
    part = slice(2 * rank, 2 * rank + 2)
    loss = engine(tokens[part], targets[part])
    engine.backward(loss)
    return loss.detach(), engine.step()


def parameter_of(engine, name=LAST):
    return dict(engine.module.named_parameters())[name]


def is_under_way(engine):
    """Whether nobody has waited yet for what the last step has changed; looks past all operators."""
    try:
        torch._C.TensorBase.data_ptr(parameter_of(engine))  # as native code does
    except RuntimeError as error:
        assert f"parameter '{LAST}' was accessed directly while the last step's values are on their way" in str(error)
        return True
    return False


# -- what programs do right after a step: each returns tensors --------------------------------------------------------


def evaluate(engine):
    tokens, targets = models.batches(1, 8)[0]
    with torch.no_grad():
        return [engine.module(tokens, targets)]


def take_state_dict(engine):
    return list(engine.module.state_dict().values())


def save_by_torch(engine):
    file = io.BytesIO()
    torch.save(engine.module.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def as_arrays(engine):
    return [torch.from_numpy(p.detach().numpy().copy()) for p in engine.module.parameters()]


def copy_deeply(engine):
    return [p.detach() for p in copy.deepcopy(engine.module).parameters()]


def take_snapshot(engine):
    return list(engine.snapshot().parameters())


def look_through_data(engine):
    return [p.data.clone() for p in engine.module.parameters()]


def print_one(engine):
    return [torch.tensor(list(str(parameter_of(engine)).encode()))]


def average(engine):
    if not hasattr(engine, "averages"):
        engine.averages = [torch.zeros_like(p) for p in engine.module.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(engine.averages, list(engine.module.parameters()), 0.5)
    return [a.clone() for a in engine.averages]


def write(engine):
    with torch.no_grad():
        engine.module.embed.weight.mul_(0.5)
        parameter_of(engine).add_(0.25)
    return []


def write_through_data(engine):
    parameter_of(engine).data.fill_(0.5)
    engine.module.h[0].up.weight.data[3] = 0.125
    return []


def load_state_dict(engine):
    engine.module.load_state_dict(models.make_model(seed=5).state_dict())
    return []


def get_and_set(engine):
    masters = [utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    utils.safe_set_full_fp32_param(parameter_of(engine), torch.full((20,), 0.5))
    return [*masters, utils.safe_get_full_optimizer_state(parameter_of(engine), "exp_avg")]


def gather_parameters(engine):
    with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
        found = [p.clone() for p in engine.module.parameters()]
        engine.module.norm.weight.mul_(0.5)  # kept: nothing is sharded
    return found


def make_like(engine):
    p = parameter_of(engine)
    return [p.new_tensor([1.0, 2.0]), p.new_zeros(3), torch.zeros_like(p), p.new(2, 3).zero_()]


def drop_gradients(engine):
    engine.optimizer.zero_grad()
    engine.zero_grad()
    return []


def by_address(tensor):
    return numpy.frombuffer(ctypes.string_at(tensor.data_ptr(), 4 * tensor.numel()), numpy.float32).copy()


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file)


# Ways to the memory of a parameter's `.data` that no operator sees.
RAW = {
    "numpy": lambda d: d.numpy().copy(),
    "numpy of a view": lambda d: d[1:].numpy().copy(),
    "asarray": lambda d: numpy.asarray(d).copy(),
    "address": by_address,
    "address of a view": lambda d: by_address(d[3:]),
    "tolist": lambda d: d.tolist(),
    "storage": lambda d: d.untyped_storage().tolist(),
    "typed storage": lambda d: d.storage().tolist(),
    "dlpack": lambda d: torch.from_dlpack(d).clone(),
    "dlpack of numpy": lambda d: numpy.from_dlpack(d).copy(),
    "torch.save": saved,
    "pickle": pickled,
    "format": lambda d: list(f"{d}".encode()),
}


def look_past_operators(how, engine):
    return [torch.as_tensor(RAW[how](parameter_of(engine).data))]


def write_by_numpy(engine):
    parameter_of(engine).data.numpy()[:] = 0.5
    return []


def look_at_a_kept_storage(engine):
    if not hasattr(engine, "storage"):
        engine.storage = parameter_of(engine).untyped_storage()
    return [torch.from_numpy(numpy.frombuffer(ctypes.string_at(engine.storage.data_ptr(), 80), numpy.float32).copy())]


ACTIONS = {
    action.__name__: action
    for action in (
        evaluate, take_state_dict, save_by_torch, as_arrays, copy_deeply, take_snapshot, look_through_data, print_one,
        average, write, write_through_data, load_state_dict, get_and_set, gather_parameters, make_like, drop_gradients,
        write_by_numpy, look_at_a_kept_storage,
    )
} | {how: functools.partial(look_past_operators, how) for how in RAW}  # fmt: skip


def run(world, overlap, action, stage=2, **settings):
    """Everything that a program sees of three steps with `action` after each."""
    engine = start(world, stage, overlap, **settings)
    seen = []
    for number in range(STEPS):
        loss, outcome = step(engine, number)
        assert is_under_way(engine) == (overlap and outcome.applied)
        seen += [loss, *(tensor.clone() for tensor in action(engine))]
    seen += [p.detach().clone() for p in engine.module.parameters()]
    seen += [engine._core.full_state(name, "master") for name, p in engine.module.named_parameters() if p.requires_grad]
    engine.destroy()
    return [*seen, *(p.detach().clone() for p in engine.module.parameters())]


def assert_same(world, action, **settings):
    train = functools.partial(run, **settings)
    for plain, overlapping in zip(*(run_ranks(world, train, on, action) for on in (False, True)), strict=True):
        assert len(plain) == len(overlapping)
        for i, (one, other) in enumerate(zip(plain, overlapping, strict=True)):
            assert torch.equal(one, other), f"result {i}"


@pytest.mark.parametrize("action", ACTIONS)
def test_a_program_sees_the_same_if_it_looks_right_after_a_step(action):
    assert_same(2, ACTIONS[action])


def nothing(engine):
    return []


class PartlyFrozen(models.TinyModel):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.h[1].requires_grad_(False)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": PartlyFrozen},
        {"optimizer": lambda p: torch.optim.NAdam(p, lr=1e-2), "gradient_clipping": 0.0},
        {"bf16": True},
        {"deeptide": {"keep_grad": True}},
        {"stage": 1, "gas": 2},
    ],
    ids=["frozen", "own optimizer", "bf16", "keep_grad", "accumulation"],
)
@pytest.mark.parametrize("world", [2, 3])
def test_training_is_the_same_if_steps_overlap(world, settings):
    assert_same(world, nothing, **settings)


# -- ranks that end, die, or fork -------------------------------------------------------------------------------------


class Mortal(torch.optim.NAdam):
    """Kills its process within a step of the engine."""

    armed = False

    def step(self, closure=None):
        if Mortal.armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def be_killed(stage, victim):
    deeptide.init_distributed()
    engine = start(None, stage, optimizer=lambda p: Mortal(p, lr=1e-2), gradient_clipping=0.0)
    step(engine)
    Mortal.armed = engine.world.rank == victim
    assert step(engine, 1)[1].applied
    assert is_under_way(engine)
    texts = []
    for touch in (evaluate, evaluate, step):  # a program that goes on meets the error again
        with pytest.raises(deeptide.CommError) as error:
            touch(engine)
        texts.append(str(error.value))
    print(json.dumps(texts))


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 2])
def test_the_first_use_of_a_parameter_names_what_a_killed_rank_did_not_publish(stage):
    for rank, result in enumerate(run_processes(3, be_killed, stage, 1, timeout=90, check=False)):
        if rank == 1:
            assert result.returncode == -signal.SIGKILL
            continue
        assert result.returncode == 0, result.stderr
        for text in json.loads(result.stdout):
            assert f"rank {rank} " in text, text
            assert "waiting for the new values of unit 'embed.weight' (first parameter 'embed.weight')" in text, text


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Linear(700, 700) for _ in range(12))
        self.norm = torch.nn.LayerNorm(700)

    def forward(self, x):
        for layer in self.h:
            x = layer(x).relu()
        return self.norm(x).square().mean()


_kept = []


def leave_after_the_last_step(overlap, keeps_engine):
    """Rank 1 ends at once; rank 0 then looks at what rank 1 has published."""
    deeptide.init_distributed()
    engine = start(None, 2, overlap, kind=Large)
    for number in range(2):
        engine.backward(engine(torch.linspace(0, 1 + number, 1400).view(2, 700)))
        assert engine.step().applied
    if engine.world.rank == 1:
        if keeps_engine:
            _kept.append(engine)  # until the interpreter ends
        return
    print(json.dumps([p.detach().double().sum().item() for p in engine.module.parameters()]))


@pytest.mark.costly
@pytest.mark.parametrize("keeps_engine", [False, True])
def test_a_rank_may_end_right_after_its_last_step(keeps_engine):
    sums = [run_processes(2, leave_after_the_last_step, on, keeps_engine)[0].stdout for on in (False, True)]
    assert sums[0] == sums[1] and len(json.loads(sums[1])) == 26


def fork_after_a_step(through_python):
    deeptide.init_distributed()
    engine = start(None)
    step(engine)
    assert is_under_way(engine)
    values = None if through_python else "was forked while the last step's values were on their way"
    child = os.fork() if through_python else ctypes.PyDLL(None).fork()
    if child == 0:
        try:
            total = parameter_of(engine).sum().item()
        except RuntimeError as error:
            os._exit(0 if values and values in str(error) else 3)
        os._exit(4 if values else total != parameter_of(engine).sum().item())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_under_way(engine) != through_python
    assert step(engine, 1)[1].applied
    sys.stdout.write("went on")


def test_a_fork_waits_for_what_is_on_its_way():
    assert [done.stdout for done in run_processes(2, fork_after_a_step, True)] == ["went on"] * 2


def test_a_child_of_native_code_is_told_instead_of_waiting_for_ever():
    assert [done.stdout for done in run_processes(2, fork_after_a_step, False)] == ["went on"] * 2


# -- kernels that torch has compiled ----------------------------------------------------------------------------------


def train_compiled(overlap):
    """Compiles after a step, while its parameters are on their way."""
    deeptide.init_distributed()
    torch.set_num_threads(1)
    engine = start(None, overlap=overlap)
    step(engine)
    assert is_under_way(engine) == overlap
    model = torch.compile(engine.module)
    tokens, targets = models.batches(1, 2)[0]
    losses = []
    for _ in range(STEPS):
        loss = model(tokens, targets)
        assert not is_under_way(engine)
        losses.append(loss.item())
        engine.backward(loss)
        assert engine.step().applied
        assert is_under_way(engine) == overlap
    print(json.dumps(losses))


@pytest.mark.slow
def test_compiled_kernels_compute_with_the_new_values(kernels):
    found = [run_processes(2, train_compiled, on, timeout=500) for on in (False, True)]
    lines = [[done.stdout.splitlines()[-1] for done in each] for each in found]
    assert lines[0] == lines[1] and len(json.loads(lines[1][0])) == STEPS


def use_one_unit_compiled(in_training):
    """A graph of the first block, right after each step."""
    deeptide.init_distributed()
    torch.set_num_threads(1)
    engine = start(None)
    block = torch.compile(engine.module.h[0])
    x = torch.linspace(-1, 1, 2 * 8 * 20).view(2, 8, 20)
    for number in range(STEPS):
        step(engine, number)
        assert is_under_way(engine)
        with contextlib.nullcontext() if in_training else torch.no_grad():
            found = block(x)
        assert is_under_way(engine), "a graph of one unit waited for all"
        torch.testing.assert_close(found, engine.module.h[0](x), rtol=1e-5, atol=1e-6)
    print("went on")


@pytest.mark.slow
@pytest.mark.parametrize("in_training", [False, True])
def test_a_compiled_graph_waits_for_its_own_units_alone(kernels, in_training):
    done = run_processes(2, use_one_unit_compiled, in_training, timeout=500)
    assert [each.stdout for each in done] == ["went on\n"] * 2
