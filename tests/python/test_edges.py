# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What programs do to a model after initialize: the engine follows, or says at once what it cannot follow."""

import copy
import warnings

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide

STAGES = [0, 1, 2, 3]
pytestmark = pytest.mark.both_ways


class Net(nn.Module):
    """Two layers, one of which a caller may skip, and a running mean that forward rebinds."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x, skip=False):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean.dtype)
        x = torch.tanh(self.first(x))
        return self.head(x if skip else torch.tanh(self.second(x)))


def inputs(rank=0, step=0, width=6):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * rank + step))


def start(world=None, stage=0, kind=Net, model=None, **extra):
    model = models.make_model(kind=kind) if model is None else model
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, **extra), world=world)
    return engine


def train(engine, steps=1, first=0, rank=0, **call):
    for step in range(first, first + steps):
        x = inputs(rank, step).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x, **call).float().square().mean())
        outcome = engine.step()
    return outcome


def plain(kind=Net, **options):
    model = models.make_model(kind=kind)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, **options}
    return model, torch.optim.AdamW(model.parameters(), **settings)


def plain_step(model, optimizer, step, ranks=1, **call):
    for rank in range(ranks):
        (model(inputs(rank, step), **call).square().mean() / ranks).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def assert_equals(engine, model, **tolerance):
    state = engine.module_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


# -- 1: what is saved is what the model holds now ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rebound_buffer_is_saved_exported_and_loaded_as_it_is(stage, tmp_path):
    def program(world):
        engine = start(world, stage)
        train(engine, 3, rank=world.rank)
        now = engine.module.mean.clone()
        assert now.abs().sum() > 0
        assert torch.equal(engine.module_state_dict()["mean"], now)
        engine.save_checkpoint(tmp_path / "saved")
        assert engine.save_16bit_model(tmp_path) or stage == 3
        train(engine, 1, first=3, rank=world.rank)
        assert not torch.equal(engine.module.mean, now)
        engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(engine.module.mean, now)
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_replaced_parameter_is_saved_as_it_is_and_told(stage, tmp_path, capfd):
    def program(world):
        engine = start(world, stage)
        train(engine, rank=world.rank)
        engine.module.head.weight = nn.Parameter(torch.full((1, 6), 7.0))
        train(engine, rank=world.rank)
        assert world.rank == 1 or "'head.weight' is another tensor" in capfd.readouterr().err
        assert torch.equal(engine.module_state_dict()["head.weight"], torch.full((1, 6), 7.0))
        engine.save_checkpoint(tmp_path, tag="replaced")
        engine.destroy()
        fresh = start(world, stage)
        fresh.load_checkpoint(tmp_path, tag="replaced")
        value = fresh.module_state_dict()["head.weight"]
        fresh.destroy()
        return value

    for value in run_ranks(2, program):
        assert torch.equal(value, torch.full((1, 6), 7.0))


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_gives_the_state_dict_on_one_rank_only(stage, tmp_path):
    def program(world):
        engine = start(
            world, stage, kind=models.TinyModel, bf16=True, zero={"stage3_gather_16bit_weights_on_model_save": True}
        )
        state = engine.module_state_dict()
        only = engine.module_state_dict(only_rank=1)
        assert engine.save_16bit_model(tmp_path / "deep" / "er")
        engine.destroy()
        return state, only

    (state, on_0), (_, on_1) = run_ranks(2, program)
    assert not on_0
    assert on_1.keys() == state.keys()
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "deep" / "er" / "model.safetensors")
    assert exported.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(exported[name], value), name


# -- 2: ranks that differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        ("vocabulary", r"parameter 'embed.weight' of shape \[37, 20\].*rank 1 has parameter.*\[38, 20\]"),
        ("frozen", r"'h.0.up.weight'.*trainable.*rank 1 has parameter 'h.0.up.weight'.*frozen"),
        ("stage", r"configuration key /zero_optimization/stage: 0; rank 1 has .*stage: 1"),
        (
            "ties",
            r"'head.weight'.*tied to 'embed.weight'; rank 1 has parameter 'head.weight' of shape \[37, 20\], Float",
        ),
        ("lr", r"configuration key /optimizer/params/lr: 0.01; rank 1 has .*lr: 0.02"),
    ],
)
def test_ranks_that_differ_are_told_at_initialize(difference, text):
    def program(world):
        odd = world.rank == 1
        sizes = {"vocab": 38} if odd and difference == "vocabulary" else {}
        sizes.update({"tied": False} if odd and difference == "ties" else {})
        model = models.make_model(**sizes)
        if odd and difference == "frozen":
            model.h[0].up.weight.requires_grad_(False)
        config = models.config(1 if odd and difference == "stage" else 0)
        if odd and difference == "lr":
            config["optimizer"]["params"]["lr"] = 0.02
        with pytest.raises(deeptide.ConfigError, match=text):
            deeptide.initialize(model=model, config=config, world=world)

    run_ranks(2, program)


# -- 3, 9, 13: memory that moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2])
def test_share_memory_is_refused_at_the_next_step_on_every_rank(stage):
    def program(world):
        engine = start(world, stage)
        train(engine, rank=world.rank)
        if world.rank == 1:
            engine.module.first.weight.data.share_memory_()
        engine.backward(engine(inputs(world.rank)).square().mean())
        kind, text = (ValueError, "'first.weight' got other memory") if world.rank == 1 else (RuntimeError, "on rank 1")
        with pytest.raises(kind, match=text):
            engine.step()
        engine.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 2])
def test_swapped_data_trains_on(stage):
    def program(world):
        engine = start(world, stage)
        weight = engine.module.first.weight
        kept = weight.data
        weight.data = weight.data.double()
        weight.data = kept
        train(engine, 3, rank=world.rank)
        state = engine.module_state_dict()
        engine.destroy()
        return state

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(3):
        plain_step(model, optimizer, step, ranks=2)
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[0][name], value.detach(), **TOLERANCE)


# -- 4: ties ----------------------------------------------------------------------------------------------------------


class AutoEncoder(nn.Module):
    def __init__(self, transposed_first=False):
        super().__init__()
        self.encoder = nn.Linear(6, 3, bias=False)
        self.decoder = nn.Linear(3, 6, bias=False)
        if transposed_first:
            self.encoder.weight = nn.Parameter(self.decoder.weight.t())
        else:
            self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


@pytest.mark.parametrize("transposed_first", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_transposed_tie_stays_one(stage, transposed_first, tmp_path):
    def kind():
        return AutoEncoder(transposed_first)

    def program(world):
        engine = start(world, stage, kind=kind)
        model = engine.module
        assert torch.equal(model(inputs()), models.make_model(kind=kind)(inputs()))
        for step in range(3):
            engine.backward(engine(inputs(world.rank, step)).square().mean())
            engine.step()
        assert torch.equal(model.decoder.weight.clone(), model.encoder.weight.t().clone())
        full = deeptide.utils.safe_get_full_fp32_param(model.decoder.weight)
        assert torch.equal(full, model.decoder.weight.clone().detach())
        engine.save_checkpoint(tmp_path)
        state = engine.module_state_dict()
        engine.destroy()
        again = start(world, stage, kind=kind)
        again.load_checkpoint(tmp_path)
        assert torch.equal(again.module.decoder.weight.clone(), state["decoder.weight"])
        again.destroy()
        return state

    ranks = run_ranks(2, program)
    model = models.make_model(kind=kind)
    weight = (model.decoder if transposed_first else model.encoder).weight
    # Plain torch sees two parameters over one memory: the reference trains the one, with the sum of both gradients.
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    other = (model.encoder if transposed_first else model.decoder).weight
    for step in range(3):
        for rank in range(2):
            (model(inputs(rank, step)).square().mean() / 2).backward()
        weight.grad += other.grad.t()
        other.grad = None
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0][name], value, **TOLERANCE)


def test_an_empty_tied_parameter_is_one_parameter():
    class Empty(Net):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(0, 0, bias=False)
            self.b = nn.Linear(0, 0, bias=False)
            self.b.weight = self.a.weight

    engine = start(kind=Empty)
    assert train(engine).applied
    engine.destroy()


# -- 5: written, then saved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_write_after_the_last_step_is_saved(stage, tmp_path):
    def program(world):
        engine = start(world, stage, bf16=True)
        train(engine, 2, rank=world.rank)
        with torch.no_grad():
            engine.module.first.weight.mul_(0).add_(0.5)
        full = deeptide.utils.safe_get_full_fp32_param(engine.module.first.weight)
        assert torch.equal(full, torch.full_like(full, 0.5))
        engine.save_checkpoint(tmp_path, tag="written")
        engine.destroy()
        fresh = start(world, stage, bf16=True)
        fresh.load_checkpoint(tmp_path, tag="written")
        full = deeptide.utils.safe_get_full_fp32_param(fresh.module.first.weight)
        fresh.destroy()
        return full

    for full in run_ranks(2, program):
        assert torch.equal(full, torch.full_like(full, 0.5))


# -- 6: requires_grad, and parameters that nobody used ----------------------------------------------------------------


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
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[0][0][name], value.detach(), msg=lambda t, n=name: f"{n}: {t}", **TOLERANCE)
        assert torch.equal(ranks[0][0][name], ranks[0][1][name]), f"{name} after a resume"


def test_a_branch_of_one_rank_counts_as_used():
    def program(world):
        engine = start(world, 2)
        for step in range(3):
            train(engine, first=step, rank=world.rank, skip=world.rank == 0)
        state = engine.module_state_dict()
        engine.destroy()
        return state

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(3):
        for rank in range(2):
            (model(inputs(rank, step), skip=rank == 0).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[1][name], value.detach(), **TOLERANCE)


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
        state = engine.module_state_dict()
        engine.destroy()
        return state

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(2):
        plain_step(model, optimizer, step, ranks=2)
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[0][name], value.detach(), **TOLERANCE)
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
        state = engine.module_state_dict()
        engine.destroy()
        return state

    def by_backward(world):
        engine = start(world, stage, gas=accumulation)
        train(engine, 2 * accumulation, rank=world.rank)
        state = engine.module_state_dict()
        engine.destroy()
        return state

    for one, other in zip(run_ranks(2, program), run_ranks(2, by_backward), strict=True):
        for name in one:
            if name != "mean":
                assert torch.equal(one[name], other[name]), name


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
        state = engine.module_state_dict()
        engine.destroy()
        return state

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
        for rank in range(2 if step == 0 else 1):
            (model(inputs(rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ranks[1][0][name], value.detach(), **TOLERANCE)


# -- 12: views --------------------------------------------------------------------------------------------------------


def test_a_view_made_before_initialize_is_told(capfd):
    class Viewing(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("view", self.first.weight.data.t())

    engine = start(kind=Viewing)
    assert "another tensor uses the memory of 'first.weight'" in capfd.readouterr().err
    engine.destroy()
    engine = start()
    assert "another tensor uses" not in capfd.readouterr().err
    engine.destroy()


# -- 13: models that run after model.bfloat16() -----------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.full((1, 3, 1, 1), 0.5))
        self.register_buffer("shift", torch.zeros(1, 3, 1, 1), persistent=False)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x * self.scale + self.shift)))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_with_batch_norm_and_fp32_buffers_trains_in_bf16(stage, capfd, tmp_path):
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    def program(world):
        engine = start(world, stage, kind=Convolutions, bf16=True)
        model = engine.module
        kinds = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        assert kinds["conv.weight"] == kinds["scale"] == kinds["shift"] == torch.bfloat16
        assert kinds["norm.weight"] == kinds["norm.running_mean"] == torch.float32
        losses = []
        for _ in range(5):
            loss = F.cross_entropy(engine(images[world.rank * 2 :][:2]).float(), torch.tensor([0, 1]))
            engine.backward(loss)
            assert engine.step().applied
            losses.append(loss.item())
        engine.save_checkpoint(tmp_path)
        assert model.norm.running_mean.abs().sum() > 0
        engine.eval()(images)
        engine.destroy()
        return losses

    for losses in run_ranks(2, program):
        assert losses[-1] < losses[0]
    assert "buffers: 2 of fp32 follow the compute type; 2 stay fp32" in capfd.readouterr().err


def test_a_deep_copy_made_after_initialize_is_the_programs_own():
    engine = start()
    twin = copy.deepcopy(engine.module)
    before = twin.first.weight.clone()
    train(engine, 2)
    assert torch.equal(twin.first.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin(inputs()).square().mean().backward()
    assert twin.first.weight.grad is not None
    engine.destroy()
