# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`keep_grad` on stages: in a loop of the program's own, `.grad` of a stage's parameters is whole before the step."""

import families
import pytest
import stages
import torch
from conftest import run_ranks

import deeptide
from deeptide.pipeline import PipelineModule

STEPS, GAS = 3, 2


def settings(stage, num_stages, keep=True, **more):
    return families.config(stage, GAS, num_stages, deeptide={"keep_grad": keep}, **more)


def grads(engine):
    return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}


def train(world, family, config, changes):
    """(losses, norms, states, gradients that were seen). changes: the program halves them."""
    engine = deeptide.initialize(model=families.make(family), config=config, world=world)[0]
    given = families.batches(family, engine.data_parallel_rank, engine.data_parallel_size, STEPS, GAS)
    own = {name for name in families.states_of(engine) if name.endswith("/master")}
    losses, norms, seen = [], [], []
    for number, batch in enumerate(given):
        output = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        loss = output["loss"] if isinstance(output, dict) else output
        engine.backward(loss)
        shown = grads(engine)
        if number % GAS < GAS - 1:
            assert not shown, "the step's last backward is to come"
        elif config["deeptide"]["keep_grad"]:
            assert {f"{name}/master" for name in shown} == own
            seen.append(shown)
            for parameter in engine.module.parameters() if changes else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        engine.step()
        assert not grads(engine)
        losses.append(loss.item())
        norms += [engine.get_global_grad_norm()] if number % GAS == GAS - 1 else []
    return losses, norms, families.states_of(engine), seen


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the latter's embedding is its head, too
def test_stages_show_what_the_uncut_model_shows(family, stage, changes):
    cut = run_ranks(4, train, family, settings(stage, 2), changes)
    uncut = run_ranks(2, train, family, settings(stage, 0), changes)
    _, norms, states, seen = uncut[0]
    found = [{**first, **last} for first, last in zip(cut[0][3], cut[2][3], strict=True)]
    for rank, (losses, its_norms, its_states, its_seen) in enumerate(cut):
        assert losses == pytest.approx(uncut[rank % 2][0], rel=1e-5) and its_norms == pytest.approx(norms, rel=1e-4)
        for name, value in its_states.items():
            torch.testing.assert_close(value, states[name], rtol=1e-3, atol=1e-5, msg=name)
        assert len(its_seen) == STEPS and all(its_seen)
    for shown, whole in zip(found, seen, strict=True):
        assert shown.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(shown[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_looking_changes_no_bit(family):
    kept = run_ranks(4, train, family, settings(1, 2), False)
    plain = run_ranks(4, train, family, settings(1, 2, keep=False), False)
    for one, other in zip(kept, plain, strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


def refuse(world, num_stages):
    text = "train_batch leaves no moment between backward and step"
    engine = deeptide.initialize(model=families.make("llama"), config=settings(1, num_stages), world=world)[0]
    with pytest.raises(deeptide.ConfigError, match=text):
        engine.train_batch(families.batches("llama", 0, 1, STEPS, GAS))
    model = PipelineModule(stages.layers(), num_stages=num_stages, loss_fn=stages.loss_of, world=world)
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=model, config=stages.config(1, GAS, deeptide={"keep_grad": True}), world=world)


def test_a_step_in_one_call_is_refused_by_name():
    run_ranks(2, refuse, 2)
