# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Copies of outputs on all stages: those of a forward of the program's own, and of an evaluation, by choice."""

import families
import pytest
import stages
import torch
from conftest import run_ranks
from torch.nn import functional as F

import deeptide
from deeptide.pipeline import PipelineModule
from deeptide.pipeline.errors import PipelineError

STEPS, GAS = 2, 2


def looks(world, name, num_stages, stage):
    """(losses, outputs): computes the loss from logits on every rank, and looks at them between and after steps."""
    settings = families.config(stage, GAS, num_stages)
    if num_stages:
        settings["parallel"]["pipeline"] = {"stages": num_stages, "outputs": "broadcast"}
    engine = deeptide.initialize(model=families.make(name), config=settings, world=world)[0]
    given = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, STEPS + 2, GAS)
    losses, seen = [], []
    for _ in range(STEPS * GAS):
        batch = next(given)
        labels = batch.pop("labels")
        output = engine(**batch, output_hidden_states=True)
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten())
        seen += [output["logits"].detach(), *output.hidden_states]
        with torch.no_grad():
            seen.append(engine(**batch).logits)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    mean, outputs = engine.eval_batch(given, return_logits=True)
    return [*losses, mean.item()], [tensor.detach() for tensor in seen] + [output.logits for output in outputs]


@pytest.mark.parametrize(("name", "num_stages"), [("llama", 3), ("gpt2", 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_stage_has_the_uncut_models_outputs_in_training_and_evaluation(name, num_stages, stage):
    losses, outputs = run_ranks(1, looks, name, 0, stage)[0]
    for its_losses, its_outputs in run_ranks(num_stages, looks, name, num_stages, stage):
        assert its_losses == pytest.approx(losses, rel=1e-5)
        assert len(its_outputs) == len(outputs)
        for one, other in zip(its_outputs, outputs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def misuse(world):
    settings = families.config(0, 1, parallel={"pipeline": {"stages": 2, "outputs": "broadcast"}})
    engine = deeptide.initialize(model=families.make("llama"), config=settings, world=world)[0]
    batch = next(families.batches("llama", 0, 1, 1, 1))
    output = engine(**batch, use_cache=True)
    if world.rank == 0:
        with pytest.raises(PipelineError, match=r"loss\.backward\(\) runs one stage"):
            output.logits.sum().backward()
        with pytest.raises(AttributeError, match="'get_seq_length' is on the last stage of the pipeline alone"):
            output.past_key_values.get_seq_length()
        with pytest.raises(AttributeError, match="'text' is on the last stage"):
            output.text()
    return output.loss.item()


def test_what_is_no_tensor_stays_on_the_last_stage():
    losses = run_ranks(2, misuse)
    assert losses[0] == losses[1]


def evaluate_layers(world, outputs):
    settings = stages.config(1, GAS, parallel={"pipeline": {"outputs": outputs}})
    model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    return engine.eval_batch(stages.batches(0, 1, 1, GAS), compute_loss=False)


def test_an_evaluation_of_layers_gives_outputs_to_all_stages_by_choice():
    first, last = run_ranks(2, evaluate_layers, "broadcast")
    assert len(first) == GAS and all(map(torch.equal, first, last))
    first, last = run_ranks(2, evaluate_layers, "last")
    assert first is None and len(last) == GAS
