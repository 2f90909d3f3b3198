# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Programs change a model after initialize: the engine follows, or says at once what it cannot follow."""

import copy
import itertools
import warnings

import models
import pytest
import torch
from conftest import run_processes, run_ranks
from edges import (
    STAGES,
    TOLERANCE,
    AutoEncoder,
    Net,
    assert_trained_as,
    final_state,
    inputs,
    plain,
    plain_step,
    start,
    train,
)
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide import utils

pytestmark = pytest.mark.both_ways


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
        assert engine.save_16bit_model(tmp_path)
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
        engine.module.head.weight = nn.Parameter(torch.full((1, 6), 7.0), requires_grad=False)
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
    safetensors = pytest.importorskip("safetensors.torch")

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
    exported = safetensors.load_file(tmp_path / "deep" / "er" / "model.safetensors")
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
        return final_state(engine)

    ranks = run_ranks(2, program)
    model, optimizer = plain()
    for step in range(3):
        plain_step(model, optimizer, step, ranks=2)
    assert_trained_as(ranks[0], model)


# -- 4: ties ----------------------------------------------------------------------------------------------------------


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


# -- 12: views --------------------------------------------------------------------------------------------------------


def test_a_view_made_before_initialize_is_told(capfd):
    class Viewing(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("view", self.first.weight.data.t())

    class Shown(Net):
        def __init__(self):
            super().__init__()
            assert all(parameter.untyped_storage().nbytes() for parameter in self.parameters())

    engine = start(kind=Viewing)
    assert "another tensor uses the memory of 'first.weight'" in capfd.readouterr().err
    engine.destroy()
    for kind in (Net, Shown):
        engine = start(kind=kind)
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
def test_a_model_with_batch_norm_and_buffers_that_are_cast_trains_in_bf16(stage, capfd, tmp_path):
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    def program(world):
        engine = start(world, stage, kind=Convolutions, bf16=True, data_types={"buffer_dtype": "bf16"}, dump_state=True)
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
    assert "buffers: 2 cast, as data_types says" in capfd.readouterr().err


@pytest.mark.parametrize("through_engine", [True, False])
def test_an_operator_that_refuses_two_types_names_the_buffers(through_engine):
    engine = start(kind=Convolutions, bf16=True)
    with pytest.raises(RuntimeError, match=r"'scale', 'shift'; .*buffer_dtype\": \"bf16"):
        (engine if through_engine else engine.module)(torch.randn(2, 3, 8, 8).bfloat16())
    engine.destroy()


class Masked(nn.Module):
    """Scores of tokens, of which a buffer hides some: -1e9 is beyond fp16."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, 0.0, -1e9, -1e9]))

    def forward(self, x):
        return torch.softmax(self.score(x) + self.mask, dim=-1)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_buffer_of_fp32_keeps_its_type_and_range(kind, stage):
    engine = start(stage=stage, kind=Masked, **({"bf16": True} if kind == "bf16" else {"fp16": {"enabled": True}}))
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    assert engine.module.mask.dtype == torch.float32
    for step in range(3):
        out = engine(inputs(step=step).to(dtype))
        assert out.dtype == torch.float32
        assert out[:, 4:].abs().max() == 0
        engine.backward(out[:, 0].square().mean())
        assert engine.step().applied
    engine.destroy()


@pytest.mark.parametrize("how", ["buffer_dtype", "keep_in_fp32_modules"])
def test_the_configuration_chooses_the_type_of_buffers(how):
    types = {"buffer_dtype": "bf16"}
    if how == "keep_in_fp32_modules":
        types["keep_in_fp32_modules"] = ["mask"]
    engine = start(kind=Masked, bf16=True, data_types=types)
    assert engine.module.mask.dtype == (torch.bfloat16 if how == "buffer_dtype" else torch.float32)
    engine.destroy()


def write_on_one_rank(world=None):
    for stage, bf16, shared in itertools.product(STAGES, [False, True], [False, True]):
        engine = start(world, stage, bf16=bf16, deeptide={"shared_memory": shared})
        rank = engine.global_rank
        train(engine, rank=rank)
        weight = engine.module.second.weight
        for modifier in (0, 1):
            told, expected = (stage, bf16, shared, modifier), 0.25 + modifier
            with deeptide.zero.GatheredParameters(engine.module.parameters(), modifier_rank=modifier):
                weight.data.fill_(0.25 + rank)  # all elements, on every rank
            with deeptide.zero.GatheredParameters([weight]):
                assert (weight.data == expected).all(), told
            assert (utils.safe_get_full_fp32_param(weight) == expected).all(), told
            train(engine, rank=rank, first=1 + modifier)
            assert not (weight.detach() == expected).all(), told
        engine.destroy()


@pytest.mark.costly
@pytest.mark.parametrize("ranks_are", ["processes", "threads"])
def test_one_ranks_writes_within_gathered_parameters_reach_all(ranks_are):
    """Rank 0's too. Processes have torch.distributed, threads do without it."""
    if ranks_are == "processes":
        run_processes(2, write_on_one_rank, preload=("deeptide",))
    else:
        run_ranks(2, write_on_one_rank)


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
