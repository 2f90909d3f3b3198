# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Who is stepped, with which gradient and which learning rate, whatever programs do between backward and step."""

import models
import pytest
import torch
from conftest import run_ranks
from edges import (
    STAGES,
    AutoEncoder,
    Net,
    assert_trained_as,
    final_state,
    inputs,
    plain,
    plain_step,
    plain_update,
    start,
    train,
)

import deeptide

pytestmark = pytest.mark.both_ways


# -- 6: requires_grad, and parameters that no rank used ---------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_unused_parameters_stay_and_count_their_own_steps(stage, tmp_path):
    def act(model, step):
        model.second.requires_grad_(step not in (1, 2))

    def calls(step):
        return {"skip": step in (4, 5)}

    def program(world):
        engine = start(world, stage)
        for step in range(8):
            act(engine.module, step)
            before = deeptide.utils.safe_get_full_fp32_param(engine.module.second.weight).clone()
            train(engine, first=step, rank=world.rank, **calls(step))
            after = deeptide.utils.safe_get_full_fp32_param(engine.module.second.weight)
            assert torch.equal(before, after) == (step in (1, 2, 4, 5))
            if step == 5:
                engine.save_checkpoint(tmp_path)
        state = engine.module_state_dict()
        engine.destroy()
        resumed = start(world, stage)
        resumed.load_checkpoint(tmp_path)
        train(resumed, 2, first=6, rank=world.rank)
        again = resumed.module_state_dict()
        resumed.destroy()
        return state, again

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(8):
        act(model, step)
        plain_step(model, optimizer, step, ranks=2, **calls(step))
    assert_trained_as(ranks[0][0], model)
    for name, _ in model.named_parameters():
        assert torch.equal(ranks[0][0][name], ranks[0][1][name]), f"{name} after a resume"


def test_a_branch_of_one_rank_counts_as_used():
    def program(world):
        engine = start(world, 2)
        for step in range(3):
            train(engine, first=step, rank=world.rank, skip=world.rank == 0)
        return final_state(engine)

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(3):
        losses = (model(inputs(rank, step), skip=rank == 0).square().mean() for rank in range(2))
        plain_update(model, optimizer, losses, ranks=2)
    assert_trained_as(ranks[1], model)


@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_what_was_frozen_at_initialize_is_refused_by_name(stage):
    def program(world):
        model = models.make_model(kind=Net)
        model.second.requires_grad_(False)
        engine = start(world, stage, model=model)
        train(engine, rank=world.rank)
        model.second.weight.requires_grad_(True)
        engine.backward(engine(inputs(world.rank)).square().mean())
        with pytest.raises(ValueError, match=r"'second\.weight' was frozen at initialize"):
            engine.step()
        model.second.weight.requires_grad_(False)
        assert engine.step().applied
        engine.destroy()

    run_ranks(2, program)


# -- 7: .grad ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_grad_from_before_initialize_is_dropped_and_told(stage, capfd):
    def program(world):
        model = models.make_model(kind=Net)
        model(inputs(world.rank)).square().mean().backward()
        engine = start(world, stage, model=model)
        assert all(p.grad is None for p in model.parameters())
        train(engine, 2, rank=world.rank)
        return final_state(engine)

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(2):
        plain_step(model, optimizer, step, ranks=2)
    assert_trained_as(ranks[0], model)
    assert "had a .grad before initialize" in capfd.readouterr().err


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_grad_set_by_hand_is_this_steps_gradient(stage, accumulation):
    def program(world):
        engine = start(world, stage, gas=accumulation)
        for step in range(2 * accumulation):
            loss = engine(inputs(world.rank, step)).square().mean()
            parameters = list(engine.module.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            outcome = engine.step()
            assert all(p.grad is None for p in parameters)
        assert outcome.applied
        return final_state(engine)

    def by_backward(world):
        engine = start(world, stage, gas=accumulation)
        train(engine, 2 * accumulation, rank=world.rank)
        return final_state(engine)

    for one, other in zip(run_ranks(2, program), run_ranks(2, by_backward), strict=True):
        for name in one:
            if name != "mean":
                assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_two_data_swaps_between_backwards_lose_no_gradient(stage):
    """The first one left in .grad completes a bucket, the second one still has to join it."""

    def swap(parameter):
        kept = parameter.data
        parameter.data = kept.double()
        parameter.data = kept

    def program(world, swaps):
        engine = start(world, stage, optimizer={"type": "SGD", "params": {"lr": 0.5}})
        for step, parameter in enumerate(engine.module.head.parameters()):
            if swaps:
                swap(parameter)
            engine.backward(engine(inputs(world.rank, step)).square().mean())
        norm = engine.step().grad_norm
        return {"norm": torch.tensor(norm), **final_state(engine)}

    for ranks in (1, 2):
        swapped, kept = (run_ranks(ranks, lambda world, swaps=swaps: program(world, swaps)) for swaps in (True, False))
        for one, other in zip(swapped, kept, strict=True):
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-6)


def test_grad_set_by_hand_after_backward_is_refused_by_name():
    engine = start()
    engine.backward(engine(inputs()).square().mean())
    engine.module.first.weight.grad = torch.ones(6, 6)
    with pytest.raises(ValueError, match=r"'first.weight' has a \.grad that was set by hand"):
        engine.step()
    engine.zero_grad()
    assert engine.module.first.weight.grad is None
    assert train(engine).applied
    engine.destroy()


@pytest.mark.parametrize("refused_on", [(0, 1), (1,)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_step_takes_no_gradient_on_any_rank(stage, refused_on):
    def program(world):
        engine = start(world, stage)
        engine.backward(engine(inputs(world.rank), skip=True).square().mean())
        by_hand = engine.module.second.weight, engine.module.head.weight
        before = by_hand[0].clone()
        refused = world.rank in refused_on
        for parameter in by_hand[: 1 + refused]:
            parameter.grad = torch.ones_like(parameter)
        text = r"'head.weight' has a \.grad that was set by hand" if refused else "on rank 1 before it began"
        with pytest.raises(ValueError if refused else RuntimeError, match=text):
            engine.step()
        for parameter in by_hand:
            parameter.grad = None
        assert engine.step().applied
        assert torch.equal(by_hand[0].clone(), before), "stepped by a gradient that was taken back"
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
def test_grad_set_by_hand_on_each_name_of_a_transposed_tie_adds_up(stage):
    def program(world, by_hand):
        engine = start(world, stage, kind=AutoEncoder)
        loss = engine(inputs(world.rank)).square().mean()
        if by_hand:
            parameters = list(engine.module.parameters())
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
        else:
            engine.backward(loss)
        assert engine.step().applied
        return final_state(engine)

    for one, other in zip(run_ranks(2, program, True), run_ranks(2, program, False), strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name


# -- 8: stale graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_backward_through_a_graph_older_than_the_step_is_torchs_error(stage):
    def program(world):
        engine = start(world, stage)
        first, second = (engine(inputs(world.rank, step)).square().mean() for step in range(2))
        engine.backward(first)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        engine.zero_grad()
        train(engine, rank=world.rank)
        engine.destroy()

    run_ranks(2, program)


# -- 10: hyper-parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_step_with_the_leading_ranks_learning_rate(stage, capfd):
    def program(world, odd):
        engine = start(world, stage)
        for step in range(3):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) * (1 + odd * world.rank)
            train(engine, first=step, rank=world.rank)
            assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (step + 1))
        return final_state(engine)

    odd, even = run_ranks(2, program, True), run_ranks(2, program, False)
    assert all(torch.equal(odd[1][name], even[0][name]) for name in even[0] if name != "mean")
    assert "lr of optimizer group 0 is 0.01 on rank 0 and 0.02 on rank 1" in capfd.readouterr().err


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_joined_rank_steps_with_the_learning_rate_of_those_that_train(stage):
    def program(world, batches):
        engine = start(world, stage)
        for step in range(batches[world.rank]):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            train(engine, first=step, rank=world.rank)
        engine.join()
        lr = engine.optimizer.param_groups[0]["lr"]
        state = engine.module_state_dict()
        engine.destroy()
        return state, lr

    ranks = run_ranks(2, program, (3, 1))
    assert [lr for _, lr in ranks] == pytest.approx([0.03, 0.03])
    model, optimizer = plain()
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        losses = (model(inputs(rank, step)).square().mean() for rank in range(2 if step == 0 else 1))
        plain_update(model, optimizer, losses, ranks=2)
    assert_trained_as(ranks[1][0], model)
