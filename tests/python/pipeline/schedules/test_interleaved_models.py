# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of anybody's by the interleaved schedule: each stage has several runs of blocks, and trains as uncut."""

import itertools

import families
import pytest
import torch
from conftest import run_ranks
from test_any_model import both, compare, load, recomputing

import deeptide
from deeptide.pipeline import LayerSpec, PipelineModule
from deeptide.pipeline.errors import PipelineError

INTERLEAVED = {"schedule": "interleaved"}


@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_chunks_of_a_model_train_as_the_uncut_one_bit_for_bit(name):
    """But for weights that two stages use, whose gradients are added over the micro-batches first."""
    compare(*both(name, 2, 1, parallel=INTERLEAVED), exact=name not in families.TIED and name != "plain")


@pytest.mark.costly
@pytest.mark.parametrize("name", ["t5", "t5-head", "bart"])
def test_chunks_of_an_encoder_and_a_decoder_train_as_uncut(name):
    compare(*both(name, 2, 1, parallel=INTERLEAVED), exact=False)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("gas", [1, 4])
def test_chunks_go_with_data_ranks_and_every_stage_of_zero(stage, bf16, gas):
    compare(*both("llama", 2, 2, stage, gas, bf16=bf16, parallel=INTERLEAVED), exact=True)


def test_chunks_of_one_stage_follow_one_another_over_three_stages():
    compare(*both("sequential", 3, 1, parallel={**INTERLEAVED, "chunks": 3}), exact=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_of_chunks_are_recomputed(use_reentrant):
    compare(*both("llama", 2, 1, edit=recomputing(use_reentrant), parallel=INTERLEAVED), exact=True)


# -- what is hidden from a chunk ---------------------------------------------------------------------------------------


class Drops(torch.nn.Module):
    """Draws random numbers before its blocks, and counts in a buffer of each."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(6, 6)
        self.drop = torch.nn.Dropout(0.5)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6)) for _ in range(4)
        )

    def forward(self, values):
        values = self.drop(self.embed(values))
        for block in self.blocks:
            values = block(values)
        return values.square().mean()


class Clock(torch.nn.Module):
    """Has no parameters, so each part of the model runs it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()))

    def forward(self, values):
        self.ticks += 1
        return values * (1 + self.ticks / 10)


class Counts(torch.nn.Module):
    """Changes its own buffers before and after the blocks, in place and by a new tensor, and computes with them."""

    def __init__(self, has_parameter):
        super().__init__()
        self.clock = Clock()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.ones(())) if has_parameter else 1.0
        for name in ("count", "ends"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, values):
        self.count += 1
        values = self.clock(values) + self.count / 10
        for block in self.blocks:
            values = block(values).tanh()
        self.ends = self.ends + values.detach().abs().mean()
        return values.square().mean() * self.scale * (1 + self.count / 10 + self.ends / 10)


def count_forwards(world, has_parameter, parallel):
    """(losses, buffers) of three steps and an evaluation."""
    settings = families.config(0, 2, 2 if parallel else 0, parallel=parallel)
    model = Counts(has_parameter)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.weight.copy_(torch.eye(6).roll(number, 0) + 0.1)
            block.bias.fill_(0.1)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    batches = [torch.randn(2, 6, generator=torch.Generator().manual_seed(number)) for number in range(8)]
    losses = [engine.train_batch(iter(batches[:2])).item(), engine.train_batch(iter(batches[2:4])).item()]
    engine.eval()
    losses.append(engine.eval_batch(iter(batches[4:6])).item())
    engine.train()
    engine.module.count.fill_(7)  # the program's own change holds in all parts
    losses.append(engine.train_batch(iter(batches[6:])).item())
    return losses, {name: value.clone() for name, value in engine.module.named_buffers()}


@pytest.mark.parametrize("has_parameter", [False, True])
def test_buffers_around_the_blocks_count_micro_batches_and_not_parts(has_parameter):
    (losses, buffers), *_ = run_ranks(1, count_forwards, has_parameter, {})
    cut = run_ranks(2, count_forwards, has_parameter, INTERLEAVED)
    for found, _ in cut:
        assert found == pytest.approx(losses, rel=1e-6)
    for name, value in cut[-1][1].items():  # the last stage's are saved
        torch.testing.assert_close(value, buffers[name])


def count_draws(world):
    torch.manual_seed(3)
    settings = families.config(0, 2, 2, parallel=INTERLEAVED)
    engine = deeptide.initialize(model=Drops(), config=settings, world=world)[0]
    drawn = []
    engine.module.drop.register_forward_hook(lambda module, given, _: drawn.append(type(given[0]) is torch.Tensor))
    computed = []
    for block in engine.module.blocks:
        block[1].register_forward_hook(lambda module, given, _: computed.append(type(given[0]) is torch.Tensor))
    for _ in range(2):
        engine.train_batch(iter([torch.randn(3, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)]))
    names = [name for name, _ in engine.module.named_parameters()]
    norms = [
        int(block[0].num_batches_tracked)
        for block in engine.module.blocks
        if "num_batches_tracked" in block[0]._buffers
    ]
    return sum(drawn), sum(computed), norms, names, engine.bubble()


def test_a_chunk_computes_its_own_blocks_alone():
    """Each micro-batch is in each block once, statistics count it once, and no dropout is drawn again."""
    results = run_ranks(2, count_draws)
    for stage, (drawn, computed, norms, names, bubble) in enumerate(results):
        assert drawn == (4 if stage == 0 else 0)  # micro-batches of two steps
        assert computed == 2 * 4  # of each of its blocks
        assert norms == [4, 4]
        blocks = {int(name.split(".")[1]) for name in names if name.startswith("blocks")}
        assert blocks == {stage, stage + 2}
        assert bubble.formula == pytest.approx(0.2)  # of one chunk 1 / 3


def count_blocks(world):
    engine = deeptide.initialize(
        model=families.make("plain"), config=families.config(0, 2, 2, parallel=INTERLEAVED), world=world
    )[0]
    engine.train_batch(families.batches("plain", 0, 1, 1, 2))
    return [type(block._buffers["seen"]) is torch.Tensor for block in engine._cut.own_blocks.values()]


def test_a_buffer_that_a_hidden_block_assigns_stays_its_own():
    assert all(itertools.chain.from_iterable(run_ranks(2, count_blocks)))


# -- checkpoints and evaluation ----------------------------------------------------------------------------------------


def save(world, folder, name):
    settings = families.config(1, 2, 2, parallel=INTERLEAVED)
    engine = deeptide.initialize(model=families.make(name), config=settings, world=world)[0]
    given = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 4, 2)
    for _ in range(2):
        engine.train_batch(given)
    engine.save_checkpoint(folder)
    states = families.states_of(engine)
    return states, [engine.train_batch(given).item() for _ in range(2)]


@pytest.mark.parametrize(("world", "num_stages"), [(1, 0), (2, 2), (4, 4)])
def test_a_checkpoint_of_chunks_loads_on_another_mesh(world, num_stages, tmp_path):
    before = run_ranks(2, save, str(tmp_path), "llama")
    whole = {key: value for states, _ in before for key, value in states.items()}
    after = run_ranks(world, load, num_stages, str(tmp_path), "llama")
    again = {key: value for states, _, _ in after for key, value in states.items()}
    assert whole.keys() == again.keys() and all(torch.equal(again[key], value) for key, value in whole.items())
    assert all(losses == pytest.approx(before[0][1], rel=1e-5) for _, losses, _ in after)


def evaluate(world, num_stages):
    settings = families.config(3, 2, num_stages, **({"parallel": INTERLEAVED} if num_stages else {}))
    engine = deeptide.initialize(model=families.make("gpt2"), config=settings, world=world)[0]
    given = families.batches("gpt2", 0, 1, 3, 1)
    losses, outputs = engine.eval_batch(given, return_logits=True, reduce_output=None, num_micro_batches=3)
    return [loss.item() for loss in losses], outputs and [output.logits for output in outputs]


def test_an_evaluation_passes_all_chunks():
    (losses, outputs), *_ = run_ranks(1, evaluate, 0)
    *_, (own, mine) = cut = run_ranks(2, evaluate, 2)
    assert all(each == losses for each, _ in cut) and own == losses
    assert all(torch.equal(a, b) for a, b in zip(mine, outputs, strict=True))


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse(world):
    def make(model, **parallel):
        return deeptide.initialize(model=model, config=families.config(0, 2, 2, parallel=parallel), world=world)[0]

    with pytest.raises(deeptide.ConfigError, match=r'parallel.chunks is 2, and parallel.schedule is "gpipe"'):
        make(families.make("gpt2"), schedule="gpipe", chunks=2)
    with pytest.raises(deeptide.ConfigError, match=r"pipeline is 2 with 3 chunks, and .* of 6 blocks or more"):
        make(families.make("gpt2"), schedule="interleaved", chunks=3)
    layers = [LayerSpec(torch.nn.Linear, 6, 6) for _ in range(4)]
    with pytest.raises(deeptide.ConfigError, match=r"chunks is 3, and the PipelineModule was built with chunks=2"):
        make(PipelineModule(layers, 2, chunks=2, world=world), schedule="interleaved", chunks=3)
    with pytest.raises(deeptide.ConfigError, match=r'"interleaved", and the PipelineModule has 1 chunks'):
        make(PipelineModule(layers, 2, world=world), schedule="interleaved")
    engine = make(families.make("gpt2"), schedule="interleaved")
    with pytest.raises(PipelineError, match="interleaved schedule overlaps micro-batches"):
        engine(**next(families.batches("gpt2", 0, 1, 1, 1)))


def test_what_does_not_go_together_is_refused():
    run_ranks(2, refuse)
