# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""State by parameter: safe_get_* and safe_set_*, whole and local, at every stage, equal to doing the same in torch."""

import edges
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide import utils

pytestmark = pytest.mark.both_ways
WORLDS = [1, 2, 3]


def new_values(like, seed=0):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def train_and_write(world, stage, bf16=False):
    """Two steps; between them a parameter, a moment and a gradient are overwritten."""
    engine = edges.start(world, stage, bf16=bf16)
    module = engine.module
    edges.train(engine, rank=world.rank)
    weight, moment = new_values(module.first.weight, 1), new_values(module.second.weight, 2).abs()
    utils.safe_set_full_fp32_param(module.first.weight, weight)
    assert torch.equal(utils.safe_get_full_fp32_param(module.first.weight), weight)
    assert torch.equal(engine.module_state_dict()["first.weight"], weight.to(module.head.weight.dtype))
    utils.safe_set_full_optimizer_state(module.second.weight, moment, "exp_avg_sq")
    assert torch.equal(utils.safe_get_full_optimizer_state(module.second.weight, "exp_avg_sq"), moment)
    x = edges.inputs(world.rank, 1).to(module.head.weight.dtype)
    engine.backward(engine(x).float().square().mean())
    gradient = new_values(module.head.weight, 3)
    utils.safe_set_full_grad(module.head.weight, gradient)
    assert torch.equal(utils.safe_get_full_grad(module.head.weight), gradient)
    outcome = engine.step()
    masters = {name: engine._core.full_state(name, "master") for name, _ in module.named_parameters()}
    engine.destroy()
    return masters, outcome.grad_norm


@pytest.mark.parametrize("stage", edges.STAGES)
@pytest.mark.parametrize("world", WORLDS)
def test_writes_count_as_in_plain_torch(world, stage):
    model, optimizer = edges.plain()
    edges.plain_step(model, optimizer, 0, ranks=world)
    with torch.no_grad():
        model.first.weight.copy_(new_values(model.first.weight, 1))
        optimizer.state[model.second.weight]["exp_avg_sq"].copy_(new_values(model.second.weight, 2).abs())
    for rank in range(world):
        (model(edges.inputs(rank, 1)).square().mean() / world).backward()
    model.head.weight.grad.copy_(new_values(model.head.weight, 3))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for masters, own_norm in run_ranks(world, train_and_write, stage):
        edges.assert_trained_as(masters, model)
        assert own_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_16_bit_writes_are_equal_at_every_stage(world):
    results = {stage: run_ranks(world, train_and_write, stage, True) for stage in edges.STAGES}
    for stage, ranks in results.items():
        for masters, norm in ranks:
            assert norm == results[0][0][1], stage
            for name, value in masters.items():
                assert torch.equal(value, results[0][0][0][name]), (stage, name)


def write_locally(world, stage):
    engine = edges.start(world, stage)
    edges.train(engine, rank=world.rank)
    engine.backward(engine(edges.inputs(world.rank, 1)).square().mean())
    parts = {}
    for name, parameter in engine.module.named_parameters():
        kinds = {
            "param": (utils.safe_get_local_fp32_param, utils.safe_set_local_fp32_param, utils.safe_get_full_fp32_param),
            "grad": (utils.safe_get_local_grad, utils.safe_set_local_grad, utils.safe_get_full_grad),
        }
        for kind, (get, put, whole) in kinds.items():
            before = whole(parameter)
            local = get(parameter)
            put(parameter, local + 1)
            assert torch.equal(get(parameter), local + 1)
            assert torch.equal(whole(parameter), before + 1), (name, kind)
            parts[name, kind] = (local, before.flatten())
        state = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
        utils.safe_set_local_optimizer_state(parameter, state * 2, "exp_avg")
        assert torch.equal(utils.safe_get_local_optimizer_state(parameter, "exp_avg"), state * 2)
    exported = engine.module_state_dict()
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(exported[name], utils.safe_get_full_fp32_param(parameter))
    engine.destroy()
    return parts


@pytest.mark.parametrize("stage", edges.STAGES)
@pytest.mark.parametrize("world", WORLDS)
def test_local_parts_make_up_the_whole(world, stage):
    ranks = run_ranks(world, write_locally, stage)
    for key, (local, whole) in ranks[0].items():
        is_whole = local.numel() == whole.numel()  # ranks that share no memory hold all at stage 0
        assert torch.equal(local if is_whole else torch.cat([parts[key][0] for parts in ranks]), whole), key


def refuse(world, stage):
    engine = edges.start(world, stage)
    weight = engine.module.first.weight
    names = []
    for call in (
        lambda: utils.safe_set_full_fp32_param(weight, torch.zeros(2, 3)),
        lambda: utils.safe_set_full_grad(weight, torch.full((6, 6), float(world.rank))),
        lambda: utils.safe_set_local_fp32_param(weight, torch.zeros(100)),
        lambda: utils.safe_set_full_optimizer_state(weight, torch.zeros(6, 6), "exp_average"),
    ):
        with pytest.raises((ValueError, deeptide.ConfigError)) as error:
            call()
        names.append(str(error.value))
    edges.train(engine, rank=world.rank)  # nothing was changed, and all ranks go on
    engine.destroy()
    return names


@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_values_are_refused_on_every_rank(stage):
    for shape, differs, count, key in run_ranks(2, refuse, stage):
        assert "'first.weight': got shape [2, 3], expected [6, 6]" in shape
        assert "differs between ranks" in differs
        assert "got 100 elements, expected the" in count
        assert "'exp_average', expected one of fp32" in key


def write_frozen(world):
    torch.manual_seed(0)
    model = edges.Net()
    model.first.requires_grad_(False)
    engine = edges.start(world, 3, model=model)
    assert utils.safe_get_local_fp32_param(model.first.weight) is None
    assert utils.safe_get_full_grad(model.second.weight) is None
    with pytest.raises(ValueError, match=r"'first.weight' has no master: it is not optimized"):
        utils.safe_set_full_fp32_param(model.first.weight, torch.zeros(6, 6))
    engine.destroy()


def test_a_frozen_parameter_has_no_state():
    run_ranks(2, write_frozen)


def update_vectorized(world):
    engine = edges.start(world, 2)
    engine.backward(engine(edges.inputs(world.rank)).square().mean())
    parameters = list(engine.module.parameters())
    utils.safe_update_full_grad_vectorized(parameters, lambda gradient, parameter: torch.zeros_like(gradient))
    norm = engine.step().grad_norm
    engine.destroy()
    return norm


def test_gradients_are_updated_by_a_function():
    assert run_ranks(2, update_vectorized) == [0.0, 0.0]


def overwrite_overflow(world, stage):
    engine = edges.start(world, stage)
    engine.backward(engine(edges.inputs(world.rank)).square().mean() * float("nan"))
    for parameter in engine.module.parameters():
        utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape))
    good = engine.step()
    engine.backward(engine(edges.inputs(world.rank)).square().mean())
    utils.safe_set_full_grad(engine.module.head.bias, torch.tensor([float("inf")]))
    bad = engine.step()
    engine.destroy()
    return good.applied, bad.applied, bad.parameter


@pytest.mark.parametrize("stage", edges.STAGES)
def test_a_written_gradient_is_checked_again(stage):
    assert run_ranks(2, overwrite_overflow, stage) == [(True, False, "head.bias")] * 2
