# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Muon: which parameters are its matrices, and that these follow torch.optim.Muon."""

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

STEPS = 50
PARAMS = {"muon_lr": 1e-2, "adam_lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}


def config(stage=0, params=None, **extra):
    return models.config(stage, optimizer={"type": "Muon", "params": PARAMS if params is None else params}, **extra)


def start(world=None, stage=0, model=None, params=None, **arguments):
    model = model or models.make_model()
    return deeptide.initialize(model=model, config=config(stage, params), world=world, **arguments)[0]


def train(engine, steps):
    rank, size = engine.world.rank, engine.world.size
    for tokens, targets in models.batches(steps, 4 * size):
        part = slice(4 * rank, 4 * rank + 4)
        engine.backward(engine(tokens[part], targets[part]))
        assert engine.step()


def matrices_of(model):
    return [name for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name]


def names_in(engine, group):
    return engine._core.group_parameters(group)


def test_matrices_are_muons_and_the_rest_is_adamws():
    model = models.make_model()
    engine = start(model=model)
    rest = [name for name, _ in model.named_parameters() if name not in matrices_of(model)]
    assert names_in(engine, 0) == matrices_of(model)
    assert names_in(engine, 1) == rest
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False]
    assert engine.get_lr() == [1e-2, 1e-3]


def test_a_parameters_own_use_muon_decides():
    model = models.make_model(tied=False)
    model.h[0].up.weight.use_muon = False
    model.embed.weight.use_muon = True
    engine = start(model=model)
    assert "h.0.up.weight" in names_in(engine, 1)
    assert "embed.weight" in names_in(engine, 0)


def test_a_group_is_split_unless_it_says_which_kind_it_is():
    model = models.make_model(tied=False)
    groups = [
        {"params": model.h[0].parameters(), "lr": 0.5},
        {"params": [model.head.weight], "use_muon": False, "lr": 0.25},
        {"params": [model.embed.weight], "use_muon": True},
    ]
    engine = start(model=model, model_parameters=groups)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5, 0.25, 1e-2]
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False, False, True]
    assert names_in(engine, 0) == ["h.0.up.weight", "h.0.down.weight"]
    assert names_in(engine, 3) == ["embed.weight"]


def test_a_vector_is_refused_by_name_if_its_group_uses_muon():
    model = models.make_model()
    groups = [{"params": [model.norm.weight], "use_muon": True}]
    with pytest.raises(ValueError, match=r"'norm.weight' has shape \[20\], but Muon steps whole matrices"):
        start(model=model, model_parameters=groups)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_rest_decays_as_adam_w_mode_says_and_matrices_do_not_care(decoupled):
    tokens, targets = models.batches(1, 4)[0]
    plain = models.make_model()
    plain(tokens, targets).backward()
    rest = {name: p for name, p in plain.named_parameters() if name not in matrices_of(plain)}
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    kind(rest.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.5).step()

    def engine_with(decoupled):
        params = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.5, "adam_w_mode": decoupled}
        engine = deeptide.initialize(model=models.make_model(), config=config(0, params, gradient_clipping=0))[0]
        engine.backward(engine(tokens, targets))
        engine.step()
        return engine.module

    model = engine_with(decoupled)
    for name, parameter in rest.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), parameter.detach(), rtol=1e-5, atol=1e-6)
    for name in matrices_of(model):
        other = engine_with(not decoupled)
        assert torch.equal(model.get_parameter(name), other.get_parameter(name))


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_rank_follows_torchs_muon(adjust, nesterov):
    def muon_of(model):
        params = [p for name, p in model.named_parameters() if name in matrices_of(model)]
        return torch.optim.Muon(
            params, lr=1e-3, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust
        )

    model = models.make_model()
    theirs = muon_of(model)
    for tokens, targets in models.batches(STEPS, 4):
        model(tokens, targets).backward()
        theirs.step()
        model.zero_grad()

    ours = models.make_model()
    engine = deeptide.initialize(model=ours, config=config(gradient_clipping=0), optimizer=muon_of(ours))[0]
    train(engine, STEPS)
    factor = 0.2 * 60**0.5 if adjust == "match_rms_adamw" else 3**0.5
    moved = STEPS * 1e-3 * factor
    for name in matrices_of(model):
        apart = (engine._core.full_state(name, "master") - model.get_parameter(name).detach()).abs().max()
        # If fp32 rounds a direction otherwise, bf16 may round it by 2^-8 otherwise, and later gradients differ.
        assert apart < 0.02 * moved, f"{name}: {apart:.1e} apart after moving by up to {moved:.1e}"


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("bf16", [False, True])
def test_worlds_of_one_to_four_are_bit_equal_between_stages(bf16):
    def run(world, stage):
        model = models.make_model()
        engine = deeptide.initialize(model=model, config=config(stage, bf16=bf16), world=world)[0]
        train(engine, 3)
        return {name: engine._core.full_state(name, "master") for name, _ in model.named_parameters()}

    for size in (1, 3, 4):
        expected = run_ranks(size, run, 0)[0]
        for stage in (1, 2, 3):
            for state in run_ranks(size, run, stage):
                assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_matrix_keeps_one_state_and_the_rest_two():
    engine = start()
    sizes = {name: p.numel() for name, p in engine.module.named_parameters()}
    matrices = sum(sizes[name] for name in names_in(engine, 0))
    rest = sum(sizes[name] for name in names_in(engine, 1))
    line = next(line for line in engine.memory() if line.role == "optimizer states")
    least = 4 * (matrices + 2 * rest)
    padding = 64 * 2 * 2 * len(sizes)  # after each parameter and each unit, in one state or two
    assert least <= line.measured_bytes <= least + padding


def test_resumes_where_the_kinds_are_the_same_and_refuses_where_not(tmp_path):
    engine = start()
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    train(engine, 4)
    resumed = start()
    resumed.load_checkpoint(str(tmp_path))
    train(resumed, 4)
    for name, _ in engine.module.named_parameters():
        assert torch.equal(engine._core.full_state(name, "master"), resumed._core.full_state(name, "master")), name

    other = start(params={**PARAMS, "use_muon": False})
    with pytest.raises(deeptide.CheckpointError, match="nothing was changed"):
        other.load_checkpoint(str(tmp_path))


class Experts(torch.nn.Module):
    """A stack of three matrices and a token embedding whose name does not say so."""

    def __init__(self):
        super().__init__()
        with models._seeding:  # ranks as threads share one generator
            torch.manual_seed(3)
            self.wte = torch.nn.Embedding(8, 6)
            self.experts = torch.nn.Parameter(torch.randn(3, 6, 10) / 4)
            self.conv = torch.nn.Parameter(torch.randn(4, 3, 2, 2) / 4)

    def forward(self, x):
        mixed = torch.einsum("bd,edh->beh", self.wte(x), self.experts).tanh()
        return mixed.square().mean() + self.conv.square().sum()


class Apart(Experts):
    """The same with each matrix a parameter."""

    def __init__(self):
        super().__init__()
        stack, conv = self.experts.data, self.conv.data
        del self.experts, self.conv
        self.each = torch.nn.ParameterList(stack.unbind())
        self.flat = torch.nn.Parameter(conv.reshape(4, -1))

    @property
    def experts(self):
        return torch.stack(list(self.each))

    @property
    def conv(self):
        return self.flat


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stack_of_matrices_is_stepped_one_by_one(size, stage):
    def run(world, kind):
        engine = start(world, stage, model=kind())
        for step in range(3):
            engine.backward(engine(torch.arange(8).roll(step + world.rank)[:4]))
            assert engine.step()
        state = engine.module_state_dict()
        engine.destroy()
        return state

    for state, expected in zip(run_ranks(size, run, Experts), run_ranks(size, run, Apart), strict=True):
        assert torch.equal(state["experts"], torch.stack([expected[f"each.{i}"] for i in range(3)]))
        assert torch.equal(state["conv"].reshape(4, -1), expected["flat"])
        assert torch.equal(state["wte.weight"], expected["wte.weight"])


def test_an_embedding_is_adamws_whatever_its_name():
    engine = start(model=Experts())
    assert names_in(engine, 0) == ["experts", "conv"]
    assert names_in(engine, 1) == ["wte.weight"]
