# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""engine.snapshot() of a model that is cut as it is: the uncut model, on every rank, apart from training."""

import families
import pytest
import torch
from conftest import run_ranks

import deeptide

GAS = 2


def check(world, name, stage, parallel):
    settings = families.config(stage, GAS, 2, parallel=parallel, bf16=stage == 2)
    engine = deeptide.initialize(model=families.make(name), config=settings, world=world)[0]
    batches = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 2, GAS)
    engine.train_batch(batches)
    snapshot = engine.snapshot()
    uncut = families.make(name)
    assert type(snapshot) is type(uncut) and not snapshot.training
    assert [type(module) for module in snapshot.modules()] == [type(module) for module in uncut.modules()]
    state, whole = snapshot.state_dict(), engine.whole_state_dict()
    assert list(state) == list(uncut.state_dict())
    assert [key for key, _ in snapshot.named_parameters()] == [key for key, _ in uncut.named_parameters()]
    assert [key for key, _ in snapshot.named_buffers()] == [key for key, _ in uncut.named_buffers()]
    assert not any(p.requires_grad for p in snapshot.parameters())
    assert whole if world.rank == 0 else not whole
    assert all(torch.equal(state[key], value) for key, value in whole.items())
    given = next(families.batches(name, 0, 1, 1, 1))
    engine.eval()
    with torch.no_grad():
        expected, found = engine.module(**given), snapshot(**given)
    assert torch.equal(found.logits, expected.logits)
    copied = {key: value.clone() for key, value in state.items()}
    engine.train_batch(batches)
    assert all(torch.equal(value, copied[key]) for key, value in snapshot.state_dict().items())
    later = engine.snapshot().state_dict()
    assert any(not torch.equal(value, copied[key]) for key, value in later.items())


@pytest.mark.parametrize(
    ("name", "stage", "parallel", "num_ranks"),
    [
        ("llama", 1, {}, 2),
        ("gpt2", 2, {}, 4),
        pytest.param("gpt2", 3, {}, 4, marks=pytest.mark.costly),
        pytest.param("bart", 0, {}, 2, marks=pytest.mark.costly),
        pytest.param("llama", 3, {"schedule": "interleaved", "chunks": 2}, 2, marks=pytest.mark.costly),
    ],
    ids=str,
)
def test_a_snapshot_is_the_uncut_model_on_every_rank(name, stage, parallel, num_ranks):
    run_ranks(num_ranks, check, name, stage, parallel)
