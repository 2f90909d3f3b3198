# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models of pictures and sound: compared at the start with inputs that their configurations describe, and trained."""

import random
import threading

import cut
import models
import numpy
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide._process import generators
from deeptide.tensor import make_team, split_model
from deeptide.tensor.cutting import check

transformers = pytest.importorskip("transformers")

_VISION = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SOUND = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
}
_WHISPER = {
    "vocab_size": 61,
    "num_mel_bins": 8,
    "d_model": 32,
    "max_source_positions": 16,
    "max_target_positions": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}


def picture(generator):
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}


KINDS = {
    "tables of heads": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
        | {"drop_path_rate": 0.0},
        picture,
    ),
    "attention in one function": ("SiglipForImageClassification", {"vision_config": _VISION}, picture),
    "pictures": ("ViTForImageClassification", {**_VISION, "hidden_dropout_prob": 0.0}, picture),
    "sound": (
        "Wav2Vec2ForSequenceClassification",
        _SOUND,
        lambda g: {"input_values": torch.randn(2, 800, generator=g), "labels": torch.tensor([0, 1])},
    ),
    "spectra": (
        "WhisperForConditionalGeneration",
        _WHISPER,
        lambda g: {"input_features": torch.randn(2, 8, 32, generator=g), "labels": torch.randint(3, 61, (2, 6))},
    ),
}


def make(name, sizes):
    cls = getattr(transformers, name)
    return models.make_model(kind=lambda: cls(cls.config_class(**sizes)))


def train(world, kind, tensor, seen):
    name, sizes, inputs_of = KINDS[kind]
    settings = {**models.config(0, micro=2), "parallel": {"tensor": tensor}}
    engine = deeptide.initialize(model=make(name, sizes), config=settings, world=world)[0]
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = inputs_of(generator)
        if inputs["labels"].dim() > 1:
            inputs["labels"] = torch.randint(3, 61, (2, 6), generator=generator)
        loss = engine(**inputs).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses, engine.get_global_grad_norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_compared_with_what_its_configuration_describes_and_trains_as_the_whole_one(kind, monkeypatch):
    compared = []
    compare = check.compare
    monkeypatch.setattr(
        check, "compare", lambda model, whole, *rest: (compared.append(whole), compare(model, whole, *rest))
    )
    shared = run_ranks(2, train, kind, 2, compared)
    assert len(compared) == 2 and all(trial.outputs for trial in compared)
    whole = run_ranks(1, train, kind, 1, compared)[0]
    cut.near(shared[0][0], whole[0], 1e-5, "losses")
    cut.near(shared[0][1], whole[1], 1e-4, "norm")


def test_what_is_drawn_in_evaluation_mode_is_drawn_alike_and_leaves_the_generator():
    model = make("ViTMAEForPreTraining", {**_VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1})
    torch.manual_seed(3)
    trial = check.try_whole(model, None, make_team(1, None, 60.0))
    assert trial.draws and trial.inputs["pixel_values"].shape == (1, 3, 16, 16)
    again = check.outputs_of(model, trial.inputs, trial.draws)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
    for first, second in zip(trial.outputs, again, strict=True):
        assert torch.equal(first, second)


class Noisy(torch.nn.Module):
    """Draws from torch's, Python's and NumPy's generators, in evaluation, too."""

    def forward(self, x):
        return x * torch.rand(()) * random.random() * numpy.random.rand()


def test_the_check_leaves_all_generators_as_they_were_and_draws_alike_each_time():
    before = generators.states()
    trial = check.try_whole(Noisy(), {"x": torch.ones(4)}, None)
    assert trial.draws
    assert torch.equal(trial.outputs[0], check.outputs_of(Noisy(), trial.inputs, trial.draws)[0])
    assert generators.are_equal(before, generators.states())


class Picky(transformers.BertForMaskedLM):
    """Wants more than words."""

    def forward(self, input_ids=None, *, mood, **inputs):
        return super().forward(input_ids=input_ids, **inputs)


def test_numbers_that_another_thread_draws_during_the_check_stay_drawn():
    """Else a model that is built there, by a rank of this process, gets the same numbers twice."""

    class Attending(torch.nn.Module):
        def forward(self, x):
            drawer = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
            drawer.start()
            drawer.join()
            heads = x.view(1, 1, 4, 8)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    drawn = []
    torch.manual_seed(2)
    expected = torch.rand(3), torch.rand(3)
    torch.manual_seed(2)
    trial = check.try_whole(Attending(), {"x": torch.ones(4, 8)}, None)
    assert not trial.draws
    assert torch.equal(drawn[0], expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_a_model_that_does_not_run_with_guessed_inputs_is_refused_unless_an_example_or_its_layers_are_given():
    sizes = {**_VISION, "vocab_size": 61, "max_position_embeddings": 16}

    def rank(world):
        team = make_team(2, world, 60.0)
        model = models.make_model(kind=lambda: Picky(transformers.BertConfig(**sizes)))
        with pytest.raises(
            deeptide.ConfigError, match="layers of Picky are found by their names, and its inputs are not"
        ):
            split_model(model, team)
        assert model.bert.encoder.layer[0].intermediate.dense.weight.shape == (48, 32)
        split_model(model, team, check=False)
        assert model.bert.encoder.layer[0].intermediate.dense.weight.shape == (24, 32)

    run_ranks(2, rank)
