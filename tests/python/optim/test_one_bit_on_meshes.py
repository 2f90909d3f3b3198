# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""1-bit optimizers on stages of a pipeline and on shared layers: each data team exchanges the signs of what it has."""

import families
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of

STEPS, GAS, FREEZE = 6, 2, 2


def settings(type, num_stages, **more):
    params = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1}
    params["var_freeze_step" if type == "ZeroOneAdam" else "freeze_step"] = FREEZE
    return families.config(0, GAS, num_stages, optimizer={"type": type, "params": params}, **more)


@pytest.mark.parametrize("type", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize("bf16", [False, True])
def test_stages_step_as_the_uncut_model_does_bit_for_bit(type, bf16):
    """Blocks are units, so each rank's slices, and with them the signs' scales, are those of the uncut model."""
    cut = run_ranks(4, families.train, "llama", settings(type, 2, bf16=bf16), GAS, STEPS)
    whole = run_ranks(2, families.train, "llama", settings(type, 0, bf16=bf16), GAS, STEPS)
    losses, norms, states = whole[0]
    found = {}
    for rank, (its_losses, its_norms, its_states) in enumerate(cut):
        assert its_losses == pytest.approx(losses, rel=1e-6)
        assert its_norms == pytest.approx(norms, rel=1e-6)
        assert all(torch.equal(value, cut[rank // 2 * 2][2][name]) for name, value in its_states.items())
        found |= its_states
    assert found.keys() == states.keys()
    for name, value in found.items():
        assert torch.equal(value, states[name]), name


def resume(world, type, num_stages, folder, saves):
    """Half of the steps, then from the checkpoint the other half: a load forgets what signs have left out."""
    engine = deeptide.initialize(model=families.make("llama"), config=settings(type, num_stages), world=world)[0]
    given = families.batches("llama", engine.data_parallel_rank, engine.data_parallel_size, STEPS, GAS)
    for _ in range(STEPS // 2):
        engine.train_batch(given) if saves else [next(given) for _ in range(GAS)]
    if saves:
        engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    for _ in range(STEPS // 2):
        engine.train_batch(given)
    return families.states_of(engine)


@pytest.mark.parametrize("type", ["OneBitAdam", "OneBitLamb"])
def test_a_checkpoint_of_stages_goes_on_in_the_uncut_model_bit_for_bit(type, tmp_path):
    cut = run_ranks(4, resume, type, 2, str(tmp_path), True)
    whole = run_ranks(2, resume, type, 0, str(tmp_path), False)[0]
    found = cut[0] | cut[2]
    assert found.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def train_slices(world, type, tensor, bf16):
    """(losses, norms, states, states after the warm-up)."""
    parallel = {"parallel": {"tensor": tensor}} if tensor > 1 else {}
    engine = deeptide.initialize(
        model=families.make("gpt2"), config=settings(type, 0, bf16=bf16, **parallel), world=world
    )[0]
    given = families.batches("gpt2", engine.data_parallel_rank, engine.data_parallel_size, STEPS, GAS)
    losses, norms, warm = [], [], {}
    for step in range(STEPS):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
        warm = warm if step >= FREEZE else families.states_of(engine)
    return losses, norms, families.states_of(engine), warm


@pytest.mark.parametrize("type", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize("bf16", [False, True])
def test_slices_exchange_signs_among_the_ranks_that_have_them(type, bf16):
    """Warm-up is the whole model's within rounding. Signs have a scale for each slice then, hence other numbers."""
    cut = run_ranks(4, train_slices, type, 2, bf16)
    whole = run_ranks(2, train_slices, type, 1, bf16)[0]
    losses, norms, states, warm = cut[0]
    close = 2e-2 if bf16 else 1e-5
    assert losses[:FREEZE] == pytest.approx(whole[0][:FREEZE], rel=close)
    assert norms[:FREEZE] == pytest.approx(whole[1][:FREEZE], rel=close)
    assert losses == pytest.approx(whole[0], rel=0.02)
    assert losses[-1] < losses[0] or type == "OneBitLamb"  # whose few steps lower no rank's
    names = {name for name, value in states.items() if value.shape != whole[2][name].shape}
    assert names and names != states.keys()  # slices, and what is whole
    for rank, (its_losses, its_norms, its_states, _) in enumerate(cut):
        assert its_losses == losses and its_norms == norms
        for name, value in its_states.items():
            assert torch.equal(value, cut[rank % 2][2][name] if name in names else states[name]), name
    assert any(not torch.equal(states[name], cut[1][2][name]) for name in names)
    for name, value in states.items():
        assert torch.equal(value, warm[name]) == name.endswith("/exp_avg_sq"), name


def first_by_signs(world, tensor):
    """{name: what the first step by signs adds}, of one data rank. Factors may move far."""
    parallel = {"parallel": {"tensor": tensor}} if tensor > 1 else {}
    config = settings("OneBitLamb", 0, **parallel)
    config["optimizer"]["params"] |= {"factor_threshold": 20.0, "factor_min": 0.01, "factor_max": 100.0}
    engine = deeptide.initialize(model=families.make("gpt2"), config=config, world=world)[0]
    given = families.batches("gpt2", 0, 1, FREEZE + 1, GAS)
    masters = {}
    for _ in range(FREEZE + 1):
        before = masters
        engine.train_batch(given)
        masters = whole(engine)
    cuts = dict(slices_of(engine.module))
    return {name: value - before[name] for name, value in masters.items() if name in cuts or tensor == 1}


def whole(engine):
    """{name: master}, slices joined. Collective."""
    team, cuts = team_of(engine.module), dict(slices_of(engine.module))
    own = {name: engine._core.full_state(name, "master") for name, _ in engine.module.named_parameters()}
    return {n: cuts[n].join(team.core.all_gather(v, "checkpoint")) if n in cuts else v for n, v in own.items()}


def test_ratios_by_signs_are_of_whole_parameters():
    """One rank compresses nothing: slices move as the whole weights do, but for the order of sums."""
    shared = run_ranks(2, first_by_signs, 2)[0]
    moved = run_ranks(1, first_by_signs, 1)[0]
    assert len(shared) == 4 * 6 + 1  # four weights and two biases of each block, and the padded vocabulary
    for name, value in shared.items():
        assert value.shape == moved[name].shape
        largest = moved[name].abs().max()
        assert (value - moved[name]).abs().max() <= 1e-3 * largest, name  # of a difference of two fp32 weights


def resume_slices(world, folder, tensor, saves):
    """The losses of the second half, from a checkpoint of the first one's."""
    parallel = {"parallel": {"tensor": tensor}} if tensor > 1 else {}
    engine = deeptide.initialize(
        model=families.make("gpt2"), config=settings("OneBitLamb", 0, **parallel), world=world
    )[0]
    given = families.batches("gpt2", engine.data_parallel_rank, engine.data_parallel_size, STEPS, GAS)
    for _ in range(STEPS // 2):
        engine.train_batch(given) if saves else [next(given) for _ in range(GAS)]
    if saves:
        engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    return [engine.train_batch(given).item() for _ in range(STEPS // 2)]


def test_ratios_of_slices_go_on_in_the_whole_model(tmp_path):
    """The mean ratio and the factor of a parameter are the same on all ranks that share it."""
    shared = run_ranks(2, resume_slices, str(tmp_path), 2, True)
    assert shared[0] == shared[1]
    assert run_ranks(1, resume_slices, str(tmp_path), 1, False)[0] == pytest.approx(shared[0], rel=1e-4)
