# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a resumed run is the run, bit for bit; another world and another stage read the same values."""

import os
import resource
import signal

import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes, run_ranks
from torch import nn

import deeptide

STEPS = 4
SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_max_lr": 0.02, "warmup_num_steps": 5}}
ROLES = ("master", "exp_avg", "exp_avg_sq")


class Dropping(models.TinyModel):
    """With dropout, a frozen parameter, and buffers: one saved that each rank changes its own way, one not saved."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(20), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens, targets):
        self.seen += tokens.sum()
        x = nn.functional.dropout(self.embed(tokens) + self.bias.to(self.embed.weight.dtype), 0.2, self.training)
        for block in self.h:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def dataset():
    tokens, targets = models.batches(1, 44)[0]
    return torch.utils.data.TensorDataset(tokens, targets)


def start(world, stage, kind=Dropping, **extra):
    extra = {"scheduler": SCHEDULE, **extra}
    engine, _, loader, _ = deeptide.initialize(
        model=models.make_model(kind=kind), config=models.config(stage, **extra), world=world, training_data=dataset()
    )
    return engine, deeptide.RepeatingLoader(loader)


def train(engine, loader, steps=STEPS):
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(*next(loader))
        engine.backward(loss)
        losses.append((loss.item(), engine.step().lr))
    return losses


def weights_of(engine):
    """Everything by name, whole. Collective."""
    names = [name for name, p in engine.module.named_parameters()]
    state = {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in ROLES}
    state.update(engine.module_state_dict())
    return {name: value for name, value in state.items() if value is not None}


def assert_same(one, other, leave_out=()):
    assert one.keys() == other.keys()
    for name in one.keys() - set(leave_out):
        assert torch.equal(one[name], other[name]), name


def counters(engine):
    return engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.get_lr()


def test_client_state_keeps_its_tuples(tmp_path):
    engine, _ = start(None, 0)
    state = {"shape": (3, (4, [5, (6,)])), "runs": [{"best": (0.5, None)}], "empty": (), "list": [1]}
    engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.load_checkpoint(tmp_path)[1] == state
    engine.destroy()


class NumpySchedule(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        return {**super().state_dict(), "numbers": [np.float64(0.25), np.int64(3)]}


@pytest.mark.parametrize("extra", [None, print])
def test_a_schedule_is_saved_if_it_can_be_loaded(extra, tmp_path):
    model = models.make_model()
    schedule = []

    def make(optimizer):
        schedule.append(NumpySchedule(optimizer, lambda step: np.float64(1.0)))
        return schedule[0]

    engine, *_ = deeptide.initialize(model=model, config=models.config(0), lr_scheduler=make)
    schedule[0].more = extra
    if extra is None:
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert schedule[0].numbers == [0.25, 3]
    else:
        with pytest.raises(deeptide.ConfigError, match=r"the state of NumpySchedule .* could not be read back"):
            engine.save_checkpoint(tmp_path)
    engine.destroy()


# -- exact resume, in real processes: a random generator belongs to a process -----------------------------------------


def run_through(stage, bf16, gas, folder):
    torch.manual_seed(3 + dist.get_rank())
    engine, loader = start(None, stage, bf16=bf16, gas=gas)
    train(engine, loader)
    state = {"best": 0.25, "names": ["a", "b"], "nested": {"rank": None}}
    assert engine.save_checkpoint(folder, client_state=state) == f"{folder}/global_step{STEPS}"
    losses = train(engine, loader)
    torch.save((losses, weights_of(engine), counters(engine)), f"{folder}/through.{engine.global_rank}")


def resume(stage, bf16, gas, folder):
    engine, _ = start(None, stage, bf16=bf16, gas=gas)
    torch.manual_seed(99)
    path, state = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step{STEPS}"
    assert state == {"best": 0.25, "names": ["a", "b"], "nested": {"rank": None}}
    # A fresh iteration of the loader: it begins where the saved one was.
    losses = train(engine, deeptide.RepeatingLoader(engine.training_dataloader))
    expected, weights, counts = torch.load(f"{folder}/through.{engine.global_rank}")
    assert losses == expected
    assert counters(engine) == counts
    assert_same(weights_of(engine), weights)


def in_both_types(function, stage, gas, folder):
    deeptide.init_distributed()
    for bf16 in (False, True):
        os.makedirs(f"{folder}/{bf16}", exist_ok=True)
        globals()[function](stage, bf16, gas, f"{folder}/{bf16}")


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "gas"), [(0, 1), (1, 2), (2, 1), (3, 1), (3, 3)])
def test_a_resumed_run_is_the_run_bit_for_bit(stage, gas, tmp_path):
    run_processes(2, in_both_types, "run_through", stage, gas, str(tmp_path))
    run_processes(2, in_both_types, "resume", stage, gas, str(tmp_path))


# -- other worlds and stages ------------------------------------------------------------------------------------------


def save(world, stage, folder, bf16=False):
    engine, loader = start(world, stage, bf16=bf16)
    train(engine, loader)
    engine.save_checkpoint(folder)
    return weights_of(engine), counters(engine)


def load(world, stage, folder, bf16):
    engine, loader = start(world, stage, bf16=bf16)
    train(engine, loader, 1)
    assert engine.load_checkpoint(folder)[0]
    state = weights_of(engine), counters(engine)
    train(engine, loader, 1)
    after = weights_of(engine)
    return *state, after


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (3, 3), (3, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("saved_at", [0, 3])
def test_another_world_and_stage_load_the_same_values(saved_at, world, stage, bf16, tmp_path):
    weights, counts = run_ranks(2, save, saved_at, str(tmp_path), bf16)[0]
    ranks = run_ranks(world, load, stage, str(tmp_path), bf16)
    for loaded, loaded_counts, after in ranks:
        # Each rank of the same world gets its own buffer back; other worlds get rank 0's.
        assert_same(loaded, weights, leave_out=["seen"])
        assert loaded_counts == counts
        # All ranks continue alike: a moment loaded on its owner only would make them diverge.
        assert_same(after, ranks[0][2], leave_out=["seen"])


@pytest.mark.parametrize(("saved_gas", "gas"), [(1, 3), (3, 2), (2, 1)])
def test_a_step_begins_anew_where_it_has_other_micro_batches(saved_gas, gas, tmp_path):
    """The same batch on fewer ranks takes more micro-batches, as in elastic training."""

    def run(world):
        engine, loader = start(world, 3, gas=saved_gas)
        train(engine, loader, 2)
        engine.save_checkpoint(str(tmp_path))
        engine, loader = start(world, 3, gas=gas)
        engine.load_checkpoint(str(tmp_path))
        assert engine.global_steps == 2
        for micro in range(1, gas + 1):
            engine.backward(engine(*next(loader)))
            assert engine.is_gradient_accumulation_boundary() == (micro == gas)
            engine.step()
            assert engine.global_steps == 2 + (micro == gas)
        engine.save_checkpoint(str(tmp_path))

    run_ranks(2, run)


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_gets_its_own_buffers_back(stage, tmp_path):
    def run(world):
        engine, loader = start(world, stage)
        train(engine, loader)
        seen = engine.module.seen.clone()
        engine.save_checkpoint(str(tmp_path))
        train(engine, loader)
        engine.load_checkpoint(str(tmp_path))
        assert torch.equal(engine.module.seen, seen)
        return seen

    one, other = run_ranks(2, run)
    assert not torch.equal(one, other)


# -- parts of a checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_module_only_loads_weights_and_nothing_else(stage, tmp_path):
    weights, _ = run_ranks(2, save, stage, str(tmp_path))[0]

    def run(world):
        engine, loader = start(world, stage)
        train(engine, loader, 1)
        before, counts = weights_of(engine), counters(engine)
        engine.load_checkpoint(str(tmp_path), load_module_only=True)
        after = weights_of(engine)
        assert counters(engine) == counts
        moments = {name for name in before if "/exp_avg" in name}
        assert_same(after, weights, leave_out=moments | {"seen"})
        assert_same(after, before, leave_out=after.keys() - moments)

    run_ranks(2, run)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_optimizer_states_moments_stay(stage, tmp_path):
    weights, counts = run_ranks(2, save, stage, str(tmp_path))[0]

    def run(world):
        engine, loader = start(world, stage)
        train(engine, loader, 1)
        before = weights_of(engine)
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        after = weights_of(engine)
        moments = {name for name in before if "/exp_avg" in name}
        assert_same(after, weights, leave_out=moments | {"seen"})
        assert_same(after, before, leave_out=after.keys() - moments)
        assert counters(engine) == counts

    run_ranks(2, run)


def test_a_tag_is_found_by_name_and_the_latest_without(tmp_path):
    engine, loader = start(None, 0)
    states = {}
    for tag in ("one", 2, None):
        train(engine, loader, 1)
        path = engine.save_checkpoint(tmp_path, tag=tag, save_latest=tag != "one")
        states[os.path.basename(path)] = weights_of(engine)
    assert list(states) == ["one", "2", "global_step3"]
    for tag, name in ((None, "global_step3"), ("one", "one"), (2, "2")):
        assert engine.load_checkpoint(tmp_path, tag=tag)[0] == str(tmp_path / name)
        assert_same(weights_of(engine), states[name])
    assert engine.load_checkpoint(tmp_path / "empty") == (None, None)
    with pytest.raises(deeptide.CheckpointError, match="four"):
        engine.load_checkpoint(tmp_path, tag="four")


def test_a_tag_may_be_saved_again(tmp_path):
    engine, loader = start(None, 0)
    for _ in range(2):
        train(engine, loader, 1)
        engine.save_checkpoint(tmp_path, tag="same")
    saved = weights_of(engine)
    train(engine, loader, 1)
    engine.load_checkpoint(tmp_path)
    assert_same(weights_of(engine), saved)
    assert sorted(os.listdir(tmp_path)) == ["latest", "same"]


# -- killed while saving ----------------------------------------------------------------------------------------------


class Large(models.TinyModel):
    def __init__(self):
        super().__init__(width=256, layers=6)


def be_killed_while_saving(stage, victim, folder):
    deeptide.init_distributed()
    engine, loader = start(None, stage, kind=Large)
    train(engine, loader, 1)
    engine.save_checkpoint(folder, tag="old")
    torch.save(weights_of(engine), f"{folder}/old.{engine.global_rank}")
    train(engine, loader, 1)

    if engine.global_rank == victim:
        # The kernel kills it in the middle of a write: no handler, no destructor, and no race.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    engine.save_checkpoint(folder, tag="new")


def load_the_old(stage, folder):
    deeptide.init_distributed()
    engine, loader = start(None, stage, kind=Large)
    assert engine.load_checkpoint(folder)[0] == f"{folder}/old"
    assert_same(weights_of(engine), torch.load(f"{folder}/old.{engine.global_rank}"))
    train(engine, loader, 1)
    engine.save_checkpoint(folder, tag="new")


@pytest.mark.costly
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_killed_while_saving_leaves_the_old_checkpoint(stage, victim, tmp_path):
    ranks = run_processes(2, be_killed_while_saving, stage, victim, str(tmp_path), check=False)
    assert ranks[victim].returncode == -signal.SIGXFSZ
    assert ranks[1 - victim].returncode == 1 and f"rank {victim}" in ranks[1 - victim].stderr
    assert not (tmp_path / "new").exists()
    run_processes(2, load_the_old, stage, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "old"]


def test_samples_are_counted_by_the_batch_that_took_them(tmp_path):
    def start_with(micro):
        return deeptide.initialize(model=models.make_model(), config=models.config(0, micro=micro))[0]

    def step(engine):
        engine.backward(engine(*models.batches(1, 4)[0]))
        engine.step()

    engine = start_with(4)
    for _ in range(3):
        step(engine)
    assert engine.global_samples == 12
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    other = start_with(1)
    other.load_checkpoint(tmp_path)
    step(other)
    assert other.global_samples == 13
