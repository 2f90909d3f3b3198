# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The check at the start: weights without symmetries, which get their bits back, and gradients of all parameters."""

import cut
import models
import pytest
import torch
from conftest import run_ranks
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.tensor import make_team, split_model
from deeptide.tensor.cutting import regions
from deeptide.tensor.cutting.perturbed import Perturbed
from deeptide.tensor.cutting.slices import Slice, adding_names

transformers = pytest.importorskip("transformers")

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Second:
    """The second of two ranks."""

    size, index = 2, 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_perturbed_weights_are_all_different_and_get_their_bits_back_also_in_slices(dtype):
    generator = torch.Generator().manual_seed(0)
    sparse = torch.randn(4, 6, 3, generator=generator) * torch.tensor([0.0, 1.0, -1.0])
    values = [
        *(torch.randn(7, 5, generator=generator), sparse, torch.zeros(1100, 1000)),  # these are cut
        *(torch.zeros(9), torch.ones(9), torch.tensor(2.5), torch.tensor([-0.0, 0.0, 1e-41, 3e38, float("inf")])),
        torch.randn(5, 4, generator=generator).t(),
    ]
    model = nn.ParameterList([nn.Parameter(value.to(dtype)) for value in values])
    before = [parameter.detach().clone() for parameter in model]
    perturbed = Perturbed(model)
    for number in (3, 4):
        assert model[number].unique().numel() >= 7  # in 16 bits two may meet
    assert all((parameter != value).any() for parameter, value in zip(model, before))
    slices = {
        id(model[number]): slice_ for number, slice_ in enumerate([Slice(0, (7,)), Slice(1, (2, 4)), Slice(0, (1100,))])
    }
    for parameter in list(model)[:3]:
        parameter.data = slices[id(parameter)].cut(parameter.data, Second)
    perturbed.restore(slices, Second)
    for parameter, value in zip(model, before):
        expected = slices[id(parameter)].cut(value, Second) if id(parameter) in slices else value
        bits = BITS[value.element_size()]
        assert torch.equal(parameter.detach().view(bits), expected.view(bits))


_SIZES = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "eos_token_id"), 2),
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "qk_layernorm": True,
    "attention_dropout": 0.0,
}


def make(kind):
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "Phi" else {}
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **options)
    model = models.make_model(kind=lambda: getattr(transformers, f"{kind}ForCausalLM")(config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def updates(world, kind, tensor):
    """Those of two steps of SGD, which shows gradients as they are."""
    settings = {
        **models.config(0, micro=2),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {"tensor": tensor},
    }
    engine = deeptide.initialize(model=make(kind), config=settings, world=world)[0]
    tokens = models.batches(1, 2, vocab=61, length=8)[0][0]
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    before = make(kind).state_dict()
    return {name: cut.moved(name, before, engine.module_state_dict()) for name, _ in make(kind).named_parameters()}


@pytest.mark.parametrize("kind", ["Phi", "StableLm"])
def test_norms_of_heads_train_as_in_the_whole_model(kind):
    """Phi has one norm for all heads, whose gradient is a part on each rank; StableLM one for each head."""
    shared = run_ranks(2, updates, kind, 2)
    whole = run_ranks(1, updates, kind, 1)[0]
    for name, update in whole.items():
        for rank in shared:
            cut.near(rank[name], update, 1e-3, name, floor=1e-4)


class Gated(nn.Module):
    """All features of its hidden layer have one scale, which is whole on each rank."""

    def __init__(self, off=1.0):
        super().__init__()
        self.fc1, self.fc2, self.scale, self.off = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(3)), off

    def forward(self, x):
        hidden = self.fc1(x)
        scale = self.scale.sum()
        if self.off != 1.0 and scale.requires_grad and hidden.shape[-1] < 8:
            scale.register_hook(lambda gradient: self.off * gradient)
        return self.fc2(F.gelu(hidden * scale))


def split(world, off, dtype=torch.float32):
    model = models.make_model(kind=lambda: Gated(off)).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        split_model(model, make_team(2, world, 60.0), example={"x": torch.arange(16.0).view(2, 8) / 8})
    finally:
        for name, value in model.state_dict().items():
            part = before[name]
            if name.startswith("fc1"):
                part = part.chunk(2, 0)[world.rank]
            elif name == "fc2.weight":
                part = part.chunk(2, 1)[world.rank]
            assert torch.equal(value, part)
    return list(adding_names(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_which_each_rank_has_a_part_add_up(dtype):
    assert run_ranks(2, split, 1.0, dtype) == [["scale"]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_example_that_the_model_does_not_take_leaves_its_weights(dtype):
    """The error is the one for the example as it was given."""

    def rank(world):
        model = models.make_model(kind=Gated).to(dtype)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same dtype"):
            split_model(model, make_team(2, world, 60.0), example={"x": torch.ones(2, 5)})
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    run_ranks(2, rank)


def test_a_gradient_that_is_no_sum_of_the_ranks_is_refused_by_its_parameters_name():
    with pytest.raises(deeptide.ConfigError, match=r"the gradient of 'scale' .* differs by 50\.0% of its size"):
        run_ranks(2, split, 0.5)


def test_a_sum_that_positions_need_is_found_though_nobody_marked_it(monkeypatch):
    monkeypatch.setattr(regions, "as_adding", lambda module, team: None)

    def rank(world):
        model = make("Phi")
        split_model(model, make_team(2, world, 60.0), sequence_parallel_norms=True)
        return set(adding_names(model))

    names = run_ranks(2, rank)[0]
    assert {"model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_layernorm.bias"} <= names
    assert "model.final_layernorm.weight" not in names


@pytest.mark.parametrize("kind", ["Phi", "StableLm"])
def test_norms_of_heads_are_refused_by_name_where_no_check_runs(kind):
    def rank(world):
        with pytest.raises(deeptide.ConfigError, match=r"self_attn\.q_layernorm.*weight' is a norm over a head's"):
            split_model(make(kind), make_team(2, world, 60.0), check=False)

    run_ranks(2, rank)
