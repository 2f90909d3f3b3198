# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Bits that fall over the steps: the older section, the quantizer of a program's own, eigenvalues that steer it."""

import json
from pathlib import Path

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide.compression.eigenvalue import Eigenvalue
from deeptide.compression.layers import compressed_layers
from deeptide.compression.quantizer import Quantizer

THEIRS = json.loads((Path(__file__).parent / "deepspeed_0_19_6.json").read_text())
OLDER = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 2,
    "quantize_algo": {"q_type": "asymmetric", "rounding": "stochastic"},
}
CURVED = {
    **OLDER,
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
    "eigenvalue": {"enabled": True, "layer_name": "h", "layer_num": 3, "max_iter": 30},
}


def grid(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-97, 98, shape, generator=generator) / 64


WEIGHT = grid(4, 6, seed=1)


@pytest.mark.parametrize("case", THEIRS["moq"], ids=lambda c: "{start}-{target}-{period}-{kind}".format(**c))
def test_quantizer_rounds_in_place_as_theirs(case):
    quantizer = Quantizer(case["groups"], case["mixed"], 0.25, case["kind"])
    parameter = nn.Parameter(WEIGHT.clone())
    parameter.start_bits, parameter.target_bits, parameter.q_period = case["start"], case["target"], case["period"]
    vector = nn.Parameter(torch.full((3,), 0.3))
    for bits, period, share, values in case["rows"]:
        parameter.data = WEIGHT.clone()
        quantizer.quantize([[parameter, vector]], False, False)
        assert (parameter.start_bits, parameter.q_period, quantizer.quantize_real_ratio) == (bits, period, share)
        if values is not None:
            assert parameter.detach().flatten().tolist() == values
    assert (vector == 0.3).all()


def test_quantizer_waits_after_an_overflow_and_for_curved_layers():
    flat, curved = (nn.Parameter(WEIGHT.clone()) for _ in range(2))
    for parameter in (flat, curved):
        parameter.start_bits, parameter.target_bits, parameter.q_period = 8, 4, 1
    quantizer = Quantizer()
    quantizer.quantize([[flat, curved]], True, False)
    assert quantizer.qsteps == 0 and torch.equal(flat, WEIGHT)
    quantizer.quantize([[flat, curved]], False, True, {id(flat): (0.1, 0), id(curved): (0.8, 1)})
    assert (flat.q_period, curved.q_period) == (2, 8)
    with pytest.raises(deeptide.ConfigError, match="q_rounding: got 'up', expected one of nearest, stochastic"):
        Quantizer(q_rounding="up")
    flat.start_bits = 3
    with pytest.raises(deeptide.ConfigError, match="start_bits 3, below target_bits 4"):
        quantizer.quantize([[flat]], False, False)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        with torch.no_grad():
            for number, block in enumerate(self.blocks):
                block.weight.copy_(grid(5, 5, seed=20 + number))
                block.bias.copy_(grid(5, seed=30 + number))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def eigenvalue(**changes):
    return Eigenvalue(
        **{"max_iter": 50, "tol": 1e-3, "stability": 1e-6, "layer_name": "blocks", "layer_num": 3, **changes}
    )


def test_eigenvalues_are_theirs():
    model, theirs = Blocks(), THEIRS["eigenvalues"]
    model(grid(4, 5, seed=40)).backward(create_graph=True)
    torch.manual_seed(5)
    found = eigenvalue().compute_eigenvalue(model)
    assert [found[id(b.weight)][0] for b in model.blocks] == pytest.approx(theirs["shares"], rel=1e-4)
    assert [found[id(b.bias)][1] for b in model.blocks] == theirs["blocks"]
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(grid(4, 5, seed=40))
    assert eigenvalue().of_loss(loss, model) == pytest.approx(theirs["raw"], rel=1e-4)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()  # can still run


def test_eigenvalues_are_those_of_the_hessian():
    model = Blocks().double()
    block = model.blocks[1]
    x = grid(4, 5, seed=40).double()
    names = ["blocks.1.weight", "blocks.1.bias"]

    def loss(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), x)

    blocks = torch.autograd.functional.hessian(loss, (block.weight, block.bias))
    sizes = [25, 5]
    hessian = torch.cat(
        [
            torch.cat([part.reshape(a, b) for part, b in zip(row, sizes, strict=True)], 1)
            for row, a in zip(blocks, sizes, strict=True)
        ]
    )
    exact = torch.linalg.eigvalsh(hessian)
    largest = exact[exact.abs().argmax()]
    got = eigenvalue(tol=1e-9, max_iter=3000).of_loss(model(x), model)[1]
    assert got == pytest.approx(float(largest), rel=1e-3)


def test_blocks_that_are_not_there_are_named():
    with pytest.raises(deeptide.ConfigError, match="got layer_name '' and layer_num 3"):
        eigenvalue(layer_name="")
    for changes in ({"layer_name": "h"}, {"layer_num": 4}):
        with pytest.raises(deeptide.ConfigError, match=r"the model has no list of . layers at"):
            eigenvalue(**changes).of_loss(Blocks()(grid(4, 5, seed=40)), Blocks())


def start(section, stage=0, bf16=False, world=None, ranks=1):
    config = models.config(stage, bf16=bf16, world=ranks, quantize_training=section)
    return deeptide.initialize(model=models.make_model(), config=config, world=world)[0]


def train(engine, first, last, rank=0, ranks=1):
    losses = []
    for number in range(first, last):
        tokens, targets = (part.chunk(ranks)[rank] for part in models.batches(number + 1, 4)[number])
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def bits_of(engine):
    return [
        (layer._compression.weight.bits, layer._compression.weight.period) for layer in compressed_layers(engine.module)
    ]


def test_older_section_rounds_every_layer():
    engine = start(OLDER)
    names = dict(models.make_model().named_parameters()).keys()
    assert dict(engine.module.named_parameters()).keys() == names
    assert len(compressed_layers(engine.module)) == 8  # 3 blocks of 2, the embedding, the head
    seen = []
    for number in range(4):
        seen.append(bits_of(engine)[0])
        train(engine, number, number + 1)
    assert seen == [(8, 1), (8, 1), (7, 2), (6, 4)]
    weight = engine.module.h[0].up
    assert weight.compressed()[0].unique().numel() <= 2 * 2**6 < weight.weight.unique().numel()


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("section", [OLDER, CURVED], ids=["steps", "eigenvalues"])
def test_resumes_exactly(section, stage, bf16, tmp_path):
    whole = start(section, stage, bf16)
    train(whole, 0, 3)
    whole.save_checkpoint(tmp_path)
    train(whole, 3, 6)
    again = start(section, stage, bf16)
    again.load_checkpoint(tmp_path)
    train(again, 3, 6)
    models.assert_same(models.everything(again), models.everything(whole))
    assert bits_of(again) == bits_of(whole) and again._less_work.state_dict() == whole._less_work.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_curved_blocks_keep_their_bits_longer_and_ranks_agree(stage):
    def run(world):
        engine = start(CURVED, stage, world=world, ranks=2)
        train(engine, 0, 2, world.rank, 2)
        return bits_of(engine)

    one, other = run_ranks(2, run)
    assert one == other
    # The period of two steps: doubled, times 1 + floor(4 * share): 5 for the most curved block, one factor per block.
    factors = [period // 4 for _, period in one]
    assert factors[0] == 1 and factors[-1] == 1  # the embedding and the head are in no block
    assert factors[1] == factors[2] and factors[3] == factors[4] and factors[5] == factors[6]
    assert max(factors) == 5 and min(factors[1:-1]) < 5


def test_mistakes_are_named():
    both = models.config(
        0,
        quantize_training=OLDER,
        compression_training={
            "weight_quantization": {
                "shared_parameters": {"enabled": True},
                "different_groups": {"a": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["up"]}},
            }
        },
    )
    from deeptide.compression import init_compression

    with pytest.raises(deeptide.ConfigError, match=r"quantize_training.enabled: true, and compression_training.weight"):
        init_compression(models.make_model(), both)
    with pytest.raises(deeptide.ConfigError, match=r"quantize_training.params.target_bits: 8 exceeds start_bits, 4"):
        start({**OLDER, "quantize_bits": {"start_bits": 4, "target_bits": 8}})
    with pytest.raises(deeptide.ConfigError, match="the model has no list of 3 layers at 'layers'"):
        start({**CURVED, "eigenvalue": {"enabled": True, "layer_name": "layers", "layer_num": 3}})


class Fused(nn.Module):
    """Attention whose kernel has no second derivative."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(8, 24)])

    def forward(self, x):
        q, k, v = self.h[0](x).view(2, 4, 3, 1, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_operators_without_a_second_derivative_are_named():
    section = {**CURVED, "eigenvalue": {"enabled": True, "layer_name": "h", "layer_num": 1}}
    config = models.config(
        0, quantize_training={**section, "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}}
    )
    engine = deeptide.initialize(model=models.make_model(kind=Fused), config=config)[0]
    with pytest.raises(deeptide.ConfigError, match="an operator of the model has no second derivative"):
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 4, 8)))
            engine.step()
