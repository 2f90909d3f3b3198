# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""engine.compile() on a model that is cut as it is: each stage's own blocks are compiled, and the numbers stay."""

import families
import pytest
import torch
from conftest import run_processes

import deeptide
from deeptide.pipeline.cutting.cut import cut_of

STEPS, GAS = 2, 3


def train(settings, backend):
    """(losses and logits, states, blocks that were compiled) of a model that is compiled, if there is a backend."""
    engine = deeptide.initialize(model=families.make("llama"), config=settings)[0]
    if backend is not None:
        engine.compile(backend, {"dynamic": False})
    given = list(families.batches("llama", 0, 1, STEPS + 1, GAS))
    batches = iter(given)
    losses = [engine.train_batch(batches).item() for _ in range(STEPS)]
    if settings["parallel"].get("schedule") != "interleaved":
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    losses.append(engine.eval_batch(iter(given[:GAS])).item())
    with torch.no_grad():
        losses.append(engine.module(given[0]["input_ids"]).logits)
    compiled = [name for name, module in engine.module.named_modules() if module._compiled_call_impl is not None]
    assert compiled == (list(cut_of(engine.module).own_blocks) if backend else [])
    states = families.states_of(engine)
    engine.destroy()
    return losses, states, compiled


def compare(stage, parallel):
    sizes = []

    def counting(graph, inputs):
        sizes.append(len(inputs))
        return graph

    settings = families.config(stage, GAS, 2, parallel=parallel)
    wanted, theirs, _ = train(settings, None)
    found, states, compiled = train(settings, counting)
    assert sizes and 0 < len(compiled) < 4
    logits, expected = found.pop(), wanted.pop()
    assert found == wanted and torch.equal(logits, expected)
    assert all(torch.equal(states[name], value) for name, value in theirs.items())


@pytest.mark.costly
@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (0, {}),
        (3, {}),
        (1, {"schedule": "zero_bubble"}),
        (1, {"schedule": "interleaved", "chunks": 2}),
    ],
    ids=str,
)
def test_a_stages_blocks_are_compiled_and_give_the_same_bits(stage, parallel):
    run_processes(2, compare, stage, parallel)
