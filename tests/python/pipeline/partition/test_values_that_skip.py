# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose later blocks, or loss, use what earlier blocks returned train on stages as they do uncut."""

import re

import families
import pytest
import torch
import torch.utils.checkpoint
from conftest import run_ranks
from skipping import MODELS, Supervised, UnetBlock
from test_any_model import both, compare, recomputing

import deeptide

GAS = 2


def train(name, num_stages, data_size=1, stage=0, gas=GAS, edit=None, **more):
    family, change = MODELS[name]
    return both(family, num_stages, data_size, stage, gas, (lambda m: edit(change(m))) if edit else change, **more)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_model_with_values_that_skip_trains_as_uncut(name, num_stages):
    """Gradients of a value that several stages use are added in another order, so within rounding."""
    compare(*train(name, num_stages), exact=False)


def compare_roughly(cut, uncut):
    """In bf16, where such sums are rounded to eight bits."""
    for losses, norms, _ in cut:
        assert losses == pytest.approx(uncut[0][0], rel=1e-2)
        assert norms == pytest.approx(uncut[0][1], rel=3e-2)
    found = {key: value for _, _, states in cut for key, value in states.items()}
    assert found.keys() == uncut[0][2].keys()
    for key, value in uncut[0][2].items():
        if key.endswith("/exp_avg"):
            close = torch.nn.functional.cosine_similarity(found[key].flatten(), value.flatten(), dim=0)
            assert close > 0.99 or value.norm() < 1e-4, (key, close)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "supervised", "unet"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("bf16", [False, True])
def test_they_go_with_data_ranks_every_stage_of_zero_and_schedule(name, stage, schedule, bf16):
    runs = train(name, 2, 2, stage, bf16=bf16, parallel={"schedule": schedule})
    if bf16:
        compare_roughly(*runs)
    else:
        compare(*runs, exact=False)


@pytest.mark.costly
@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved"])
@pytest.mark.parametrize("name", ["mixtral", "unet"])
def test_three_stages_take_every_schedule(name, schedule):
    compare(*train(name, 3 if schedule == "zero_bubble" else 2, parallel={"schedule": schedule}), exact=False)


def test_chunks_of_three_blocks_pass_skips_through_their_own_stage():
    compare(*train("unet", 2, parallel={"schedule": "interleaved", "chunks": 3}), exact=False)


def frozen(begin, end):
    """Trains blocks from `begin` to `end` alone, and the head."""

    def edit(model):
        for name, parameter in model.named_parameters():
            number = re.search(r"(?:blocks|layers)\.(\d+)", name)
            is_trained = "head" in name if number is None else begin <= int(number[1]) < end
            parameter.requires_grad_(is_trained)
        return model

    return edit


@pytest.mark.parametrize("name", ["mixtral", "unet", "supervised"])
@pytest.mark.parametrize("trained", [(0, 1), (1, 3), (9, 9)], ids=str)
def test_frozen_blocks_have_values_that_skip(name, trained):
    cut, uncut = train(name, 3, edit=frozen(*trained))
    assert all(each[:2] == cut[0][:2] for each in cut)
    compare([each for each in cut if each[2]], uncut, exact=False)  # stages may train nothing


# -- recomputation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "supervised"])
def test_blocks_that_give_such_values_are_recomputed(name, use_reentrant):
    def edit(model):
        recomputing(use_reentrant)(model.inner if isinstance(model, Supervised) else model)
        return model

    compare(*train(name, 3, edit=edit), exact=False)


def recompute_call(block, *given):
    return torch.utils.checkpoint.checkpoint(block, *given, use_reentrant=False)


@pytest.mark.parametrize("activations", [{}, {"policy": "auto", "memory": "1GiB"}], ids=["", "measured"])
@pytest.mark.parametrize("name", ["unet", "by-hooks"])
def test_a_checkpoint_around_a_call_keeps_what_skips(name, activations):
    """A stage cannot compute a block again that it passed over: hooks there have saved values for backward.

    Hooks on what autograd keeps get a copy of a tensor with history: of what another stage has, no tensor has any.
    """

    def edit(model):
        model.call = recompute_call
        return model

    more = {"activation_checkpointing": activations} if activations else {}
    compare(*train(name, 3, edit=edit, **more), exact=False)


@pytest.mark.parametrize("activations", [{"policy": "recompute"}, {"policy": "auto", "memory": "1GiB"}], ids=str)
@pytest.mark.parametrize("name", ["inside", "unet"])
def test_a_policy_leaves_blocks_alone_that_another_chunk_passes_over(name, activations):
    """They are of this stage, and what hooks inside them saved of a value that came has no second forward."""
    more = {"activation_checkpointing": activations, "parallel": {"schedule": "interleaved", "chunks": 2}}
    compare(*train(name, 2, **more), exact=False)


class RecomputingBlock(UnetBlock):
    """The checkpoint is in its forward, where Transformers has it in its blocks."""

    def forward(self, *given):
        return torch.utils.checkpoint.checkpoint(super().forward, *given, use_reentrant=False)


@pytest.mark.parametrize("parallel", [{}, {"schedule": "interleaved", "chunks": 2}], ids=str)
@pytest.mark.parametrize(
    ("name", "num_stages"), [("inside", 2), ("unet", 2), ("hands-the-first", 2), ("hands-the-first", 3)]
)
def test_a_checkpoint_inside_a_block_keeps_what_skips(name, num_stages, parallel):
    def edit(model):
        for block in model.blocks:
            block.__class__ = RecomputingBlock
        return model

    compare(*train(name, num_stages, edit=edit, **({"parallel": parallel} if parallel else {})), exact=False)


# -- kinds of forwards -------------------------------------------------------------------------------------------------


def train_in_turns(world, num_stages):
    """Every second micro-batch asks for the routers' loss."""
    model = families.make("mixtral")
    model.router_aux_loss_coef = 0.5
    engine = deeptide.initialize(model=model, config=families.config(1, 4, num_stages), world=world)[0]
    given = list(families.batches("mixtral", engine.data_parallel_rank, engine.data_parallel_size, 3, 4))
    turns = iter([{**batch, "output_router_logits": bool(number % 2)} for number, batch in enumerate(given)])
    losses = [engine.train_batch(turns).item() for _ in range(3)]
    wanted = [sorted(labels) for labels in engine._cut.skips._wanted.values()] if num_stages else []
    return losses, families.states_of(engine), wanted


def test_each_kind_of_forward_has_its_own_values():
    whole = run_ranks(1, train_in_turns, 0)[0]
    cut = run_ranks(2, train_in_turns, 2)
    found = {key: value for _, states, _ in cut for key, value in states.items()}
    for losses, _, wanted in cut:
        assert losses == pytest.approx(whole[0], rel=1e-5)
        assert [len(labels) for labels in wanted] == [0, 2]  # of the two blocks before: their logits, and nothing else
        assert all(re.match(r"model\.layers\.[01]\.mlp\.gate#", label) for label in wanted[1])
    for key, value in whole[1].items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5, msg=key)


def look(world, num_stages):
    model = MODELS["mixtral"][1](families.make("mixtral"))
    engine = deeptide.initialize(model=model, config=families.config(3, GAS, num_stages), world=world)[0]
    given = lambda **more: iter([{**each, **more} for each in families.batches("mixtral", 0, 1, 1, GAS)])  # noqa: E731
    before = engine.eval_batch(given()).item()
    losses, outputs = engine.eval_batch(given(output_hidden_states=True), return_logits=True, reduce_output=None)
    engine.train_batch(given())
    by_hand = engine.eval_batch(
        given(output_hidden_states=True),
        loss_fn=lambda output, _: torch.stack([hidden.square().mean() for hidden in output.hidden_states]).sum(),
    )
    return [before, *(loss.item() for loss in losses), engine.eval_batch(given()).item(), by_hand.item()], outputs


@pytest.mark.parametrize("num_stages", [2, 3])
def test_an_evaluation_gives_losses_and_outputs_of_all_blocks(num_stages):
    losses, outputs = run_ranks(1, look, 0)[0]
    *others, last = run_ranks(num_stages, look, num_stages)
    assert all(own == pytest.approx(losses, rel=1e-5) for own, _ in [*others, last])
    assert all(each is None for _, each in others)
    for mine, whole in zip(last[1], outputs, strict=True):
        assert len(mine.hidden_states) == len(whole.hidden_states) == 5 and len(mine.router_logits) == 4
        for name in ("hidden_states", "router_logits"):
            assert all(torch.equal(a, b) for a, b in zip(mine[name], whole[name], strict=True))


def by_hand(world, name, num_stages):
    family, edit = MODELS[name]
    engine = deeptide.initialize(
        model=edit(families.make(family)), config=families.config(2, GAS, num_stages), world=world
    )[0]
    losses = []
    for batch in families.batches(family, engine.data_parallel_rank, engine.data_parallel_size, 3, GAS):
        output = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        loss = output["loss"] if isinstance(output, dict) else output
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.get_global_grad_norm(), families.states_of(engine)


@pytest.mark.parametrize("name", ["mixtral", "unet", "by-hooks", "supervised"])
def test_a_loop_of_the_programs_own_has_them_too(name):
    whole = run_ranks(1, by_hand, name, 0)[0]
    cut = run_ranks(3, by_hand, name, 3)
    found = {key: value for _, _, states in cut for key, value in states.items()}
    assert all(losses == pytest.approx(whole[0], rel=1e-5) for losses, _, _ in cut)
    for key, value in whole[2].items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5, msg=key)


def count(world, name):
    family, edit = MODELS[name]
    engine = deeptide.initialize(model=edit(families.make(family)), config=families.config(0, GAS, 2), world=world)[0]
    forwards = []
    engine.module.register_forward_pre_hook(lambda module, given: forwards.append(1))
    steps = []
    for _ in range(2):
        engine.train_batch(families.batches(family, 0, 1, 1, GAS))
        steps.append(len(forwards))
    return steps, [value.item() for key, value in engine.module.named_buffers() if key.endswith("count")]


def test_the_first_forward_alone_is_made_again_and_buffers_count_it_once():
    assert run_ranks(2, count, "collects") == [([GAS + 1, 2 * GAS + 1], [2 * GAS])] * 2
