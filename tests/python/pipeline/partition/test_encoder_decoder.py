# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder, such as T5's and BART's, are one chain: cut anywhere, they train as uncut."""

import families
import pytest
import torch
import transformers
from conftest import run_ranks
from test_any_model import both, compare, load, recomputing, save

import deeptide
from deeptide.pipeline.cutting.blocks import find_blocks

# Gradients of weights that two stages use are added over the micro-batches first: all are within rounding, and where
# no weight is used twice, bit for bit.
EXACT = ("transformer",)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [(name, n) for name in families.ENCODERS_AND_DECODERS for n in (2, 3, 4)],
)
def test_an_encoder_and_a_decoder_train_as_uncut(name, num_stages):
    """The second of four stages has the encoder's end and the decoder's begin. The target is embedded before both."""
    compare(*both(name, num_stages, 1), exact=name in EXACT and num_stages == 2)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_t5_goes_with_data_ranks_and_every_stage_of_zero(stage, schedule):
    compare(*both("t5", 2, 2, stage, parallel={"schedule": schedule}), exact=False)


@pytest.mark.costly
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_of_t5_are_recomputed(use_reentrant):
    compare(*both("t5", 3, 1, edit=recomputing(use_reentrant)), exact=False)


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 0)), ((1, 0), (3, 3)), ((4, 2), (2, 2))], ids=str)
def test_a_checkpoint_of_t5_loads_on_another_mesh(saved, loaded, tmp_path):
    before = run_ranks(saved[0], save, saved[1], str(tmp_path), "t5")
    after = run_ranks(loaded[0], load, loaded[1], str(tmp_path), "t5")
    whole = {key: value for states, _, _ in before for key, value in states.items()}
    again = {key: value for states, _, _ in after for key, value in states.items()}
    uncut = {f"{key}/{role}" for key, _ in families.make("t5").named_parameters() for role in families.ROLES}
    assert whole.keys() == again.keys() == uncut
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    if saved[0] != 4:  # the same batches
        for _, losses, _ in after:
            assert losses == pytest.approx(before[0][1], rel=1e-5)


def look(world, num_stages):
    engine = deeptide.initialize(model=families.make("t5"), config=families.config(0, 2, num_stages), world=world)[0]
    losses, outputs = engine.eval_batch(
        families.batches("t5", 0, 1, 2, 2), return_logits=True, reduce_output=None, num_micro_batches=3
    )
    return [loss.item() for loss in losses], outputs


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_output_has_the_encoders_last_state(num_stages):
    whole = run_ranks(1, look, 0)[0]
    results = run_ranks(num_stages, look, num_stages)
    assert all(losses == whole[0] for losses, _ in results)
    for mine, uncut in zip(results[-1][1], whole[1], strict=True):
        assert torch.equal(mine.logits, uncut.logits)
        assert torch.equal(mine.encoder_last_hidden_state, uncut.encoder_last_hidden_state)
        assert torch.equal(mine["encoder_last_hidden_state"], uncut.encoder_last_hidden_state)


def cuts(world):
    engine = deeptide.initialize(model=families.make("t5"), config=families.config(1, 1, 2), world=world)[0]
    return [name for name, _ in engine.module.named_parameters()], engine._cut.passage._parts


def test_what_lies_between_belongs_to_the_stage_of_the_encoders_end():
    (first, stages), (last, _) = run_ranks(2, cuts)
    assert find_blocks(families.make("t5"), 2).names == [
        *(f"encoder.block.{number}" for number in range(2)), *(f"decoder.block.{number}" for number in range(3))
    ]  # fmt: skip
    assert "shared.weight" in first and "shared.weight" not in last and not set(first) & set(last)
    assert ("encoder.final_layer_norm.weight" in first) == (stages[1] == 0)
    assert "decoder.final_layer_norm.weight" in last


def test_an_encoder_alone_is_one_chain():
    config = transformers.BertConfig(**families._SIZES, **families._TOKENS)
    names = find_blocks(transformers.BertModel(config), 2).names
    assert names == [f"encoder.layer.{number}" for number in range(4)]


@pytest.mark.parametrize("kind", ["", "text_"])
def test_an_encoder_and_a_decoder_are_known_by_a_word_of_their_names(kind):
    model = torch.nn.ModuleDict(
        {
            f"{kind}{side}": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in "ab")})
            for side in ("decoder", "encoder")
        }
    )
    sides = ("encoder", "encoder", "decoder", "decoder")
    assert find_blocks(model, 2).names == [f"{kind}{side}.layers.{number % 2}" for number, side in enumerate(sides)]
