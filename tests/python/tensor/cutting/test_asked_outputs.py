# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Hidden states of all blocks and attention's weights leave a model that is cut as they leave a whole one."""

import cut
import families
import meshes
import models
import pytest
import torch
from conftest import run_ranks
from test_sequence_parallel_models import LENGTH, MICRO, VOCAB, Counted, make, parallel

import deeptide
from deeptide.tensor import team_of

transformers = pytest.importorskip("transformers")

ASKED = {"output_hidden_states": True, "output_attentions": True}
KEYS = ("hidden_states", "attentions")


def eager(kind):
    model = make(kind)
    model.set_attn_implementation("eager")  # others return no weights
    return model


def asked(output):
    """{place: tensor} of all hidden states and weights that a model has returned."""
    return {f"{key}.{at}": each for key, value in output.items() if key.endswith(KEYS) for at, each in enumerate(value)}


def square(output):
    """A loss over all of them, in which no two positions, heads or features are alike."""
    found = asked(output).values()
    return sum((each.float() * torch.linspace(0.5, 1.5, each.numel()).view_as(each)).square().mean() for each in found)


def train(world, kind, settings, recompute=False):
    model = eager(kind)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    tokens = models.batches(1, MICRO, vocab=VOCAB, length=LENGTH)[0][0]
    output = engine(input_ids=tokens, labels=tokens, **ASKED)
    engine.backward(output.loss + square(output))
    gradients = cut.whole(engine, "gradient")
    engine.step()
    return {place: each.detach() for place, each in asked(output).items()}, gradients, engine.get_global_grad_norm()


def compare(shared, whole):
    values, gradients, norm = whole
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for found in shared:
        assert found[0].keys() == values.keys() and len(values) >= 7  # three blocks
        for place, value in values.items():
            assert found[0][place].shape == value.shape, place
            cut.near(found[0][place], value, 1e-5, place)
            assert torch.equal(found[0][place], shared[0][0][place]), "all ranks agree in every bit"
        cut.near(found[2], norm, 1e-4, "norm")
        for name, gradient in gradients.items():
            cut.near(found[1][name], gradient, 1e-4, name, floor=largest / 1000)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "mixtral", "gpt_neox", "deepseek_v2"])
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (4, 3)])
@pytest.mark.parametrize("by_parts", [False, True])
def test_a_loss_over_all_outputs_is_that_of_the_whole_model(kind, ranks, stage, by_parts):
    settings = models.config(stage, micro=MICRO)
    axis = parallel(ranks) if by_parts else {"parallel": {"tensor": ranks}}
    compare(run_ranks(ranks, train, kind, {**settings, **axis}), run_ranks(1, train, kind, settings)[0])


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant"])
def test_outputs_of_blocks_that_are_recomputed_are_whole(way):
    settings = models.config(0, micro=MICRO)
    shared = run_ranks(2, train, "llama", {**settings, **parallel(2)}, way)
    compare(shared, run_ranks(1, train, "llama", settings, way)[0])


def evaluate(world, kind, settings, length):
    engine = deeptide.initialize(model=eager(kind), config=settings, world=world)[0]
    engine.eval()
    tokens = torch.arange(2 * length).view(2, length) % VOCAB
    with torch.no_grad():
        output = engine(input_ids=tokens, **ASKED)
        as_tuple = engine(input_ids=tokens, return_dict=False, **ASKED)
    if kind != "bert":
        options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, **ASKED}
        steps = engine.module.generate(tokens, max_new_tokens=2, **options)
        output |= {f"{at}.{key}": steps[key][at] for key in KEYS for at in range(2)}
    return {**asked(output), **{str(at): each for at, each in enumerate(as_tuple[-2] + as_tuple[-1])}}


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_evaluation_gives_outputs_of_any_length_without_padding(kind, length):
    settings = models.config(0)
    whole = run_ranks(1, evaluate, kind, settings, length)[0]
    for found in run_ranks(2, evaluate, kind, {**settings, **parallel(2)}, length):
        assert found.keys() == whole.keys()
        for place, value in whole.items():
            cut.near(found[place], value, 1e-5, place)


def exchanges(world, more):
    engine = deeptide.initialize(model=eager("llama"), config={**models.config(0), **parallel(2)}, world=world)[0]
    team = team_of(engine.module)
    team.core = Counted(team.core)
    tokens = models.batches(1, MICRO, vocab=VOCAB, length=LENGTH)[0][0]
    engine(input_ids=tokens, **more).logits.sum().backward()
    return {key: count for key, count in team.core.calls.items() if count}


def test_only_who_asks_pays():
    plain, states, both = (run_ranks(2, exchanges, more)[0] for more in ({}, {"output_hidden_states": True}, ASKED))
    gathers = "all_gather", "forward"
    assert states == {**plain, gathers: plain[gathers] + 2}, "three blocks: the last one joins anyhow"
    assert both == {**plain, gathers: plain[gathers] + 2 + 3}


# -- what cannot be joined --------------------------------------------------------------------------------------------


def refuse_computed(world):
    model = eager("llama")
    inner = model.model.forward

    def scaled(*args, **kwargs):
        output = inner(*args, **kwargs)
        if "hidden_states" in output:
            output["hidden_states"] = tuple(2 * each for each in output.hidden_states)
        return output

    model.model.forward = scaled
    engine = deeptide.initialize(model=model, config={**models.config(0), **parallel(2)}, world=world)[0]
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCAB
    engine(input_ids=tokens)
    with pytest.raises(
        ValueError, match=r"hidden_states of LlamaModel: \(2, 4, 32\) is of one of the ranks .* between blocks"
    ):
        engine(input_ids=tokens, output_hidden_states=True)


def test_what_is_computed_of_parts_outside_of_blocks_is_refused_by_name():
    run_ranks(2, refuse_computed)


# -- stages -----------------------------------------------------------------------------------------------------------


def even_batches(length=8):  # it divides, as stages need
    tokens = torch.arange(families.MICRO * length).view(families.MICRO, length) % families.VOCABULARY
    return [{"input_ids": tokens, "labels": tokens, "output_hidden_states": True}] * meshes.GAS


def states_loss(output, _):
    assert len(output.hidden_states) == 5
    return output.logits.square().mean() + square(output)


def train_stages(world, settings):
    engine = meshes.start(world, "llama", settings)
    given = even_batches()
    losses = [engine.train_batch(iter(given), loss_fn=states_loss).item() for _ in range(2)]
    with torch.no_grad():
        output = engine.module(**given[0])
    return losses, engine.get_global_grad_norm(), asked(output)


def test_stages_send_parts_that_are_joined_on_the_last_one():
    settings = meshes.config("llama", 0, 2, 2, parallel={"sequence_parallel_norms": True})
    whole = run_ranks(1, train_stages, meshes.config("llama", 0, pipeline=1))[0]
    for losses, norm, states in run_ranks(4, train_stages, settings):
        cut.near(losses, whole[0], 1e-5, "losses")
        cut.near(norm, whole[1], 1e-4, "norm")
        assert states.keys() == whole[2].keys()
        for place, state in whole[2].items():
            cut.near(states[place], state, 1e-4, place)


def refuse_weights(world):
    model = meshes.make("llama")
    model.set_attn_implementation("eager")
    settings = meshes.config("llama", 0, 2, 2, deeptide={"error_grace": 1})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = [{**each, "output_hidden_states": False, "output_attentions": True} for each in even_batches()]
    # The first stage hears of the last one's error.
    with pytest.raises(
        (ValueError, deeptide.CommError), match=r"attentions of .* is of one of the ranks .* another stage has"
    ):
        engine.train_batch(iter(given), loss_fn=lambda output, _: output.logits.sum() + square(output))


def test_attention_weights_of_other_stages_are_refused_by_name():
    run_ranks(4, refuse_weights)
