# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that "activation_checkpointing" has recomputed train to the bit as they do without."""

import copy
import io
import pickle
import subprocess
import sys

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deeptide

STEPS, MICRO = 3, 2
RECOMPUTE = {"policy": "recompute"}


def auto(memory):
    return {"policy": "auto", "memory": memory}


class Odd(models.Block):
    """Writes buffers of every kind: a batch norm's, an iteration's that its output uses, and one that is replaced."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("direction", torch.ones(width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.direction.add_(self.up.weight.detach().float().sum(0))
            self.direction.div_(self.direction.norm())
            self.calls = self.calls + 1
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return super().forward(x * (1 + self.direction.to(x.dtype)))


class OddModel(models.TinyModel):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.h = nn.ModuleList(Odd(20) for _ in range(3))


class Dropping(models.TinyModel):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.h = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.3)) for block in self.h)


def train(world, kind, config, activations, steps=STEPS, lengths=None):
    config = config | ({"activation_checkpointing": activations} if activations else {})
    engine = deeptide.initialize(model=models.make_model(kind=kind), config=config, world=world)[0]
    gas = config["gradient_accumulation_steps"]
    seen = []
    for step in range(steps):
        for micro in range(gas):
            length = 6 if lengths is None else lengths[world.rank]
            tokens, targets = models.batches(1, MICRO, length=length, seed=100 * step + 10 * micro + world.rank)[0]
            loss = engine(tokens, targets)
            engine.backward(loss)
            seen.append(loss.item())
            outcome = engine.step()
        seen.append(outcome.grad_norm)
    states = {name: value.clone() for name, value in models.everything(engine).items()}
    choice = engine.activation_checkpointing()
    engine.destroy()
    return seen, states, choice


def compare(one, other):
    for (seen, states, _), (expected, wanted, _) in zip(one, other, strict=True):
        assert seen == expected
        models.assert_same(states, wanted)


def both(world_size, kind, config, activations):
    trained = run_ranks(world_size, train, kind, config, activations)
    compare(trained, run_ranks(world_size, train, kind, config, None))
    return trained


# Between what TinyModel keeps with all of its blocks recomputed and with none, in fp32.
HALF = auto("22KiB")


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("activations", [RECOMPUTE, HALF], ids=["recompute", "auto"])
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.both_ways
def test_a_policy_changes_no_bit(stage, activations, gas, precision):
    config = models.config(stage, gas=gas, bf16=precision == "bf16", fp16={"enabled": precision == "fp16"})
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    if activations is HALF and precision != "fp32":
        activations = auto("11KiB")
    for _, _, choice in both(2, models.TinyModel, config, activations):
        assert choice.blocks == ["h.0", "h.1", "h.2"]
        if activations is RECOMPUTE:
            assert choice.recomputed == choice.blocks
        else:
            assert 0 < len(choice.recomputed) < 3 and choice.predicted_bytes <= choice.budget_bytes


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("activations", [RECOMPUTE, HALF], ids=["recompute", "auto"])
def test_buffers_that_blocks_write_are_as_without_a_policy(stage, activations):
    both(2, OddModel, models.config(stage, gas=2), activations)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("activations", [RECOMPUTE, HALF], ids=["recompute", "auto"])
def test_dropout_draws_alike(stage, activations):
    """In one rank: ranks as threads share torch's generator."""
    found = []
    for given in (activations, None):
        torch.manual_seed(7)
        found.append(run_ranks(1, train, Dropping, models.config(stage, gas=2), given))
    compare(*found)


@pytest.mark.parametrize("activations", [RECOMPUTE, HALF], ids=["recompute", "auto"])
def test_states_in_files_go_with_it(activations, tmp_path):
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": files, "offload_param": files}
    both(2, models.TinyModel, models.config(3, zero=zero), activations)


def test_autocast_and_zero_init_go_with_it():
    def with_init(world, activations):
        with models._seeding, deeptide.zero.Init():
            torch.manual_seed(0)
            model = models.TinyModel()
        config = models.config(3, torch_autocast={"enabled": True, "dtype": "bfloat16"})
        config |= {"activation_checkpointing": activations} if activations else {}
        engine = deeptide.initialize(model=model, config=config, world=world)[0]
        seen = []
        for tokens, targets in models.batches(STEPS, MICRO, seed=world.rank):
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        return seen, models.everything(engine), None

    compare(run_ranks(2, with_init, HALF), run_ranks(2, with_init, None))


# -- what is kept -----------------------------------------------------------------------------------------------------


class Living(TorchDispatchMode):
    """Bytes of all storages that operators have made and that live, but for a model's own."""

    def __init__(self, model):
        super().__init__()
        self.made, self.most = {}, 0
        self.own = {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.own:
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now())
        return result

    def now(self):
        self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.made.values())


class Deep(nn.Module):
    """Blocks of two kinds: every third one keeps three times as much."""

    def __init__(self, blocks=9):
        super().__init__()
        self.blocks = nn.ModuleList(Expanding(16, 6 if i % 3 == 2 else 2) for i in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Expanding(nn.Module):
    def __init__(self, width, times):
        super().__init__()
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def peak_of(memory):
    """(choice, bytes that live at most in forward and backward of the second step), of one rank."""
    extra = {} if memory is None else {"activation_checkpointing": auto(memory)}
    config = models.config(0, deeptide={"tune_allocator": False}, **extra)
    engine = deeptide.initialize(model=models.make_model(kind=Deep), config=config, world=alone())[0]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        living = Living(engine.module)
        with living:
            loss = engine(x)
            kept = living.now()
            loss.backward()
        engine.step()
    choice = engine.activation_checkpointing()
    engine.destroy()
    return choice, kept, living.most


def alone():
    return deeptide.make_world(torch.distributed.HashStore(), 0, 1)


def test_the_bytes_that_live_are_those_that_were_predicted():
    _, kept, most = peak_of(None)
    choice, _, _ = peak_of(1 << 30)
    assert choice.recomputed == []
    assert choice.predicted_bytes == choice.kept_bytes == pytest.approx(kept, rel=0.05)
    least, middle = choice.least_bytes, (choice.least_bytes + choice.kept_bytes) // 2
    assert least < 0.6 * kept
    for budget in (least, middle):
        choice, kept_now, most_now = peak_of(budget)
        assert 0 < len(choice.recomputed) <= 9
        assert least <= choice.predicted_bytes <= budget
        # Gradients and what one operator makes besides come on top, as they do without a policy.
        assert most_now - budget <= most - choice.kept_bytes
        assert kept_now <= budget


def test_a_larger_budget_recomputes_for_less_time():
    whole, _, _ = peak_of(1 << 30)
    budgets = [whole.least_bytes + i * (whole.kept_bytes - whole.least_bytes) // 4 for i in range(5)]
    counts = [len(peak_of(budget)[0].recomputed) for budget in budgets]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[4] == 0


def test_a_budget_below_all_choices_is_refused_with_its_figures():
    whole, _, _ = peak_of(1 << 30)
    config = models.config(0, activation_checkpointing=auto(whole.least_bytes - 1))
    model = models.make_model(kind=Deep)
    before = copy.deepcopy(model.state_dict())
    engine = deeptide.initialize(model=model, config=config, world=alone())[0]
    with pytest.raises(deeptide.ConfigError, match=r"with all 9 blocks recomputed.*train_micro_batch_size_per_gpu"):
        engine(torch.randn(64, 16))
    engine.destroy()
    models.assert_same(before, model.state_dict())
    assert {type(block) for block in model.blocks} == {Expanding}


# -- ranks agree ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_other_batches_choose_alike(stage):
    config = models.config(stage, gas=2)
    _, _, small = run_ranks(1, train, models.TinyModel, config, auto("1GiB"))[0]
    trained = run_ranks(2, train, models.TinyModel, config, auto("40KiB"), STEPS, [3, 12])
    compare(trained, run_ranks(2, train, models.TinyModel, config, None, STEPS, [3, 12]))
    choices = [choice for _, _, choice in trained]
    assert choices[0] == choices[1] and choices[0].recomputed
    assert choices[0].kept_bytes > 1.5 * small.kept_bytes  # of the longer batch


def test_a_rank_without_a_batch_takes_part_in_the_choice():
    def uneven(world):
        config = models.config(1, activation_checkpointing=HALF)
        engine = deeptide.initialize(model=models.make_model(), config=config, world=world)[0]
        for tokens, targets in models.batches(world.rank * 2, MICRO):
            engine.backward(engine(tokens, targets))
            engine.step()
        engine.join()
        return engine.activation_checkpointing()

    first, second = run_ranks(2, uneven)
    assert first == second and not first.is_pending


def test_a_choice_is_resumed(tmp_path):
    def run(world, loads):
        config = models.config(1, activation_checkpointing=HALF)
        engine = deeptide.initialize(model=models.make_model(), config=config, world=world)[0]
        if loads:
            assert engine.activation_checkpointing().is_pending
            engine.load_checkpoint(str(tmp_path))
            return engine.activation_checkpointing()
        for tokens, targets in models.batches(1, MICRO):
            engine.backward(engine(tokens, targets))
            engine.step()
        engine.save_checkpoint(str(tmp_path))
        return engine.activation_checkpointing()

    saved, loaded = run_ranks(2, run, False), run_ranks(2, run, True)
    assert not saved[0].is_pending
    assert saved == loaded
    assert run_ranks(1, run, True)[0].is_pending is False  # of the same batch on each rank


def test_another_budget_measures_anew(tmp_path):
    for memory, loads in (("50KiB", False), ("60KiB", True)):
        config = models.config(1, activation_checkpointing=auto(memory))
        engine = deeptide.initialize(model=models.make_model(), config=config, world=alone())[0]
        if loads:
            engine.load_checkpoint(str(tmp_path))
        else:
            tokens, targets = models.batches(1, MICRO)[0]
            engine.backward(engine(tokens, targets))
            engine.step()
            engine.save_checkpoint(str(tmp_path))
        assert engine.activation_checkpointing().is_pending is loads
        engine.destroy()


# -- the program's side -----------------------------------------------------------------------------------------------


def test_evaluation_recomputes_nothing(monkeypatch):
    config = models.config(0, activation_checkpointing=RECOMPUTE)
    engine = deeptide.initialize(model=models.make_model(), config=config, world=alone())[0]
    tokens, targets = models.batches(1, MICRO)[0]
    calls = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda f, *args, **_: calls.append(f) or f(*args))
    with torch.no_grad():
        engine(tokens, targets)
    with torch.inference_mode():
        engine(tokens, targets)
    assert calls == []
    engine(tokens, targets)
    assert len(calls) == 3
    engine.destroy()


@pytest.mark.costly
def test_what_is_off_is_not_loaded():
    code = """
import sys, torch, deeptide
engine = deeptide.initialize(model=torch.nn.Sequential(torch.nn.Linear(2, 2)), config={
    "train_batch_size": 1, "optimizer": {"type": "Adam"}, "activation_checkpointing": {"policy": "none"}})[0]
engine.backward(engine(torch.ones(1, 2)).sum()); engine.step()
assert engine.activation_checkpointing() is None
assert not [name for name in sys.modules if name.startswith("deeptide.activations.p")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_copies_are_of_the_plain_classes_and_the_end_gives_blocks_back():
    config = models.config(0, activation_checkpointing=HALF)
    model = models.make_model()
    engine = deeptide.initialize(model=model, config=config, world=alone())[0]
    block = model.h[0]
    assert isinstance(block, models.Block) and type(block) is not models.Block
    for other in (engine.snapshot(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.h[0]) is models.Block
        assert not any("_deeptide" in name for name in other.h[0].__dict__)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    engine.destroy()
    assert type(block) is models.Block and "_deeptide_activations" not in block.__dict__


@pytest.mark.costly
@pytest.mark.parametrize("activations", [RECOMPUTE, HALF], ids=["recompute", "auto"])
def test_a_compiled_model_gives_the_same_losses(activations):
    found = []
    for given in (activations, None):
        config = models.config(1) | ({"activation_checkpointing": given} if given else {})
        engine = deeptide.initialize(model=models.make_model(), config=config, world=alone())[0]
        engine.compile(backend="aot_eager")
        losses = []
        for tokens, targets in models.batches(STEPS, MICRO):
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.is_compiled
        engine.destroy()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "policy", "text"),
    [
        (lambda: nn.Linear(2, 2), RECOMPUTE, 'policy is "recompute", and Linear has no ModuleList or Sequential'),
        (models.TinyModel, {"policy": "host"}, 'policy is "host", and on a CPU'),
    ],
)
def test_what_a_policy_cannot_do_is_refused_before_anything_changes(model, policy, text):
    config = models.config(0, activation_checkpointing=policy)
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=model(), config=config, world=alone())


def test_a_forward_that_was_replaced_on_a_block_is_named():
    model = models.make_model()
    model.h[1].forward = lambda x: x
    config = models.config(0, activation_checkpointing=RECOMPUTE)
    with pytest.raises(deeptide.ConfigError, match=r"h\.1\.forward was replaced on the module itself"):
        deeptide.initialize(model=model, config=config, world=alone())
    assert {type(block) for block in model.h} == {models.Block}


@pytest.mark.parametrize("memory", ["1MiB", 1 << 20, "1048576B"])
def test_a_plan_leaves_the_budget_free(memory):
    machine = deeptide._C.MachineLimits(3 << 20, "available memory")
    config = models.config(0, activation_checkpointing=auto(memory))
    made = deeptide.plan(models.make_model(), config, 2)
    assert made.activation_bytes == 1 << 20
    assert "Activations, at most 1.0 MiB per rank (activation_checkpointing.memory), and" in str(made)
    from deeptide._forecast.plan import choices

    found = choices(models.make_model(), config, 4, machine=machine)
    assert found and all("less 4.0 MiB of activations" in choice.why_not for choice in found)


def test_frozen_blocks_below_the_trained_ones_keep_nothing(monkeypatch):
    model = models.make_model(tied=False)
    model.embed.requires_grad_(False)
    model.h[0].requires_grad_(False)
    config = models.config(0, activation_checkpointing=RECOMPUTE)
    engine = deeptide.initialize(model=model, config=config, world=alone())[0]
    calls = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda f, *args, **_: calls.append(f) or f(*args))
    engine(*models.batches(1, MICRO)[0])
    assert len(calls) == 2
    engine.destroy()


def test_a_block_that_is_used_twice_has_one_name():
    model = models.make_model()
    model.h.append(model.h[0])
    model.h.append(model.h[1])
    engine = deeptide.initialize(
        model=model, config=models.config(0, activation_checkpointing=auto("1GiB")), world=alone()
    )[0]
    losses = []
    for tokens, targets in models.batches(2, MICRO):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    choice = engine.activation_checkpointing()
    assert choice.blocks == ["h.0", "h.1", "h.2"] and not choice.is_pending
    engine.destroy()
    assert {type(block) for block in model.h} == {models.Block}
