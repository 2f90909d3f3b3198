# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""1-bit optimizers on stages of a pipeline and on shared layers: each data team exchanges the signs of what it has."""

import families
import pytest
import torch
from conftest import run_ranks

import deeptide

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


@pytest.mark.parametrize("type", ["OneBitAdam", "ZeroOneAdam"])
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
    assert losses[-1] < losses[0]
    names = {name for name, value in states.items() if value.shape != whole[2][name].shape}
    assert names and names != states.keys()  # slices, and what is whole
    for rank, (its_losses, its_norms, its_states, _) in enumerate(cut):
        assert its_losses == losses and its_norms == norms
        for name, value in its_states.items():
            assert torch.equal(value, cut[rank % 2][2][name] if name in names else states[name]), name
    assert any(not torch.equal(states[name], cut[1][2][name]) for name in names)
    for name, value in states.items():
        assert torch.equal(value, warm[name]) == name.endswith("/exp_avg_sq"), name


def refuse(world, model, type, text, parallel):
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=families.make(model), config=settings(type, 0, parallel=parallel), world=world)


def test_steps_that_take_norms_by_signs_are_refused_on_slices():
    text = r"OneBitLamb, whose steps by signs take norms of whole parameters; choose OneBitAdam or ZeroOneAdam"
    run_ranks(2, refuse, "gpt2", "OneBitLamb", text, {"tensor": 2})
