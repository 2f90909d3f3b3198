# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""generate() of a model that is cut into stages, and whole forwards without gradients: the uncut model's numbers."""

import json
import re

import families
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide import CommError
from deeptide.pipeline.errors import PipelineError

GAS = 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # tied weights' gradients have another order of additions
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "uncached": {"use_cache": False},
}


def prompt(number=0):
    return torch.randint(3, families.VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(number))


def make(name):
    """One whose text depends on what it is given."""
    model = families.make(name)
    if name == "t5":
        model.config.num_layers = model.config.num_decoder_layers  # by which Transformers makes the decoder's cache
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def text_of(model, number=0, **options):
    """(tokens, logits of the new ones)."""
    tokens = prompt(number)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    settings = {"do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 2, "max_new_tokens": 5, **options}
    made = model.generate(tokens, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    return made.sequences, torch.stack(made.logits)


def initialize(world, name, stage, num_stages, **more):
    settings = families.config(stage, GAS, num_stages, **more)
    engine = deeptide.initialize(model=make(name), config=settings, world=world)[0]
    return engine, families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 4, GAS)


def generate_between(world, name, stage, num_stages, ways, more):
    """(losses, texts): trains a step, generates, trains another one, generates."""
    engine, given = initialize(world, name, stage, num_stages, **more)
    losses, texts = [], []
    for _ in range(2):
        losses.append(engine.train_batch(given).item())
        engine.module.eval()
        texts += [text_of(engine.module, engine.data_parallel_rank, **WAYS[way]) for way in ways]
    return losses, texts


def compare(name, stage=0, num_stages=2, data_size=1, ways=("greedy",), close=CLOSE, **more):
    tensor = more.get("parallel", {}).get("tensor", 1)
    cut = run_ranks(num_stages * data_size * tensor, generate_between, name, stage, num_stages, ways, more)
    plain = {key: value for key, value in more.items() if key != "parallel"}
    whole = run_ranks(data_size, generate_between, name, stage, 0, ways, plain)
    for rank, (losses, texts) in enumerate(cut):
        expected = whole[rank // tensor % data_size]
        if tensor == 1:
            assert losses == pytest.approx(expected[0], rel=1e-6)
        for (tokens, logits), (expected_tokens, expected_logits) in zip(texts, expected[1], strict=True):
            assert torch.equal(tokens, expected_tokens)
            torch.testing.assert_close(logits, expected_logits, **close)
    new = torch.cat([tokens[:, -5:] for tokens, _ in whole[0][1]])
    assert len(new.unique()) > 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral", "t5", "bart"])
def test_a_cut_model_generates_the_uncut_models_text(name):
    compare(name, ways=tuple(WAYS) if name in ("llama", "t5") else ("greedy",))


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_generation_goes_with_every_stage_of_zero(stage, num_stages):
    """At stage 3 data ranks generate other texts, and gather for each other."""
    compare("llama", stage, num_stages, data_size=2 if num_stages == 2 else 1)


def test_generation_goes_with_shared_layers():
    compare("gpt2", 3, 2, parallel={"tensor": 2}, close={"rtol": 1e-3, "atol": 1e-4})


def test_generation_goes_with_chunks():
    compare("gpt2", parallel={"schedule": "interleaved", "chunks": 2})


def test_generation_goes_with_bf16():
    compare("qwen3", 2, bf16=True, close={"rtol": 0.05, "atol": 0.05})


def sample(num_stages):
    """In a process: samples while dropout draws too, between steps that dropout has made differ."""
    deeptide.init_distributed()
    torch.manual_seed(7 + num_stages)  # the ranks' generators are at one place, until blocks draw
    model = make("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    settings = families.config(0, GAS, num_stages)
    engine = deeptide.initialize(model=model, config=settings)[0]
    torch.manual_seed(5)
    if num_stages and engine.stage_id > 0:
        torch.rand(engine.stage_id)  # each stage has drawn otherwise
    before = torch.get_rng_state()
    made = []
    for training in (True, False):
        engine.module.train(training)
        made.append(text_of(engine.module, do_sample=True, top_k=0)[0].tolist())
    kept = torch.equal(torch.get_rng_state(), before)
    print(json.dumps([made, kept if num_stages and engine.stage_id > 0 else not kept]))


@pytest.mark.costly
def test_stages_sample_the_uncut_models_tokens_with_dropout_and_keep_their_generators():
    preload = ("deeptide", "transformers")
    cut = run_processes(3, sample, 3, preload=preload)
    whole = run_processes(1, sample, 0, preload=preload)[0]
    expected = json.loads(whole.stdout)
    assert len(set(torch.tensor(expected[0]).flatten().tolist())) > 4
    assert [json.loads(rank.stdout) for rank in cut] == [expected] * 3


def look(world, name, num_stages):
    engine, given = initialize(world, name, 1, num_stages)
    engine.train_batch(given)
    engine.eval()
    with torch.no_grad():
        output = engine.module(**next(given), output_hidden_states=True)
    with torch.inference_mode():
        again = engine.module(**next(given), use_cache=False)
    engine.train()
    return output, again, engine.train_batch(given).item()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_call_without_gradients_gives_whole_outputs_on_every_stage(name):
    expected, again, loss = run_ranks(1, look, name, 0)[0]
    for output, other, its_loss in run_ranks(3, look, name, 3):
        assert type(output) is type(expected) and output.keys() == expected.keys()
        for one, its in ((output, expected), (other, again)):
            for key in its.keys() - {"past_key_values"}:
                torch.testing.assert_close(one[key], its[key], **CLOSE)
        assert its_loss == pytest.approx(loss, rel=1e-5)


def calls_in_a_loss(world):
    engine, given = initialize(world, "llama", 0, 2, deeptide={"error_grace": 0.2})

    def loss_fn(output, labels):
        with torch.no_grad():
            return engine.module(input_ids=prompt()).logits.mean()

    error = (PipelineError, "the model was called within a step of the schedule") if world.rank else (CommError, "")
    with pytest.raises(error[0], match=error[1]):
        engine.train_batch(given, loss_fn=loss_fn)


def test_a_loss_function_cannot_call_the_model():
    run_ranks(2, calls_in_a_loss)


def differ(world):
    engine, _ = initialize(world, "llama", 0, 2, deeptide={"error_grace": 0.2})
    with pytest.raises(ValueError, match=r"stages \d and \d call the model with other tensors"):
        text_of(engine.module, world.rank)
    text_of(engine.module)  # nothing is left of the call
    with pytest.raises(PipelineError, match="into 2 stages; call engine"):
        engine.module(input_ids=prompt())  # with gradients
    error, text = (PipelineError, "is called with other arguments on stages 0 and 1") if world.rank else (CommError, "")
    with pytest.raises(error, match=text):
        engine.module.generate(prompt(), max_new_tokens=4, prefix_allowed_tokens_fn=lambda *_: [world.rank + 3])


def test_stages_that_generate_other_tokens_are_told():
    run_ranks(2, differ)


class Penalized(torch.nn.Module):
    """Uses a weight past the module that holds it; a block writes into what it is handed."""

    def __init__(self, writes):
        super().__init__()
        self.embed, self.writes = torch.nn.Embedding(9, 4), writes
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.writes else hidden @ self.embed.weight.T


class Writes(torch.nn.Linear):
    def forward(self, hidden):
        return hidden.mul_(super().forward(hidden))


def asks_in_vain(world, writes):
    model = Penalized(writes)
    if writes:
        model.blocks = torch.nn.ModuleList(Writes(4, 4) for _ in range(4))
    settings = families.config(0, 1, 2, deeptide={"error_grace": 0.2})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    stage, text = (0, "writes into what it is called with") if writes else (1, r"the output depends on 'embed\.weight'")
    with torch.no_grad(), pytest.raises(PipelineError if world.rank == stage else CommError) as caught:
        engine.module(prompt() % 9)
        engine.eval_batch(iter([prompt()]))  # hears of the other one's error
    assert world.rank != stage or re.search(text, str(caught.value))


@pytest.mark.parametrize("writes", [False, True])
def test_values_that_do_not_travel_are_named(writes):
    run_ranks(2, asks_in_vain, writes)
