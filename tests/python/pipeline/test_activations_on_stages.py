# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that a policy has recomputed, on the stages of a pipeline and where ranks share layers."""

import families
import pytest
import torch
from conftest import run_ranks

import deeptide

GAS = 3


def train(world, name, config, activations):
    config = config | ({"activation_checkpointing": activations} if activations else {})
    engine = deeptide.initialize(model=families.make(name), config=config, world=world)[0]
    losses, norms = [], []
    given = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 3, GAS)
    for _ in range(3):
        losses.append(engine.train_batch(given).item())
        norms.append(engine.get_global_grad_norm())
    buffers = {key: value.clone() for key, value in engine.module.named_buffers() if type(value) is torch.Tensor}
    states, choice = families.states_of(engine), engine.activation_checkpointing()
    engine.destroy()
    return losses, norms, states, buffers, choice


def compare(name, num_ranks, config, activations):
    with_it = run_ranks(num_ranks, train, name, config, activations)
    without = run_ranks(num_ranks, train, name, config, None)
    for (losses, norms, states, buffers, _), (expected, wanted, theirs, own, _) in zip(with_it, without, strict=True):
        assert losses == expected and norms == wanted
        for found, other in ((states, theirs), (buffers, own)):
            assert found.keys() == other.keys()
            assert [key for key, value in other.items() if not torch.equal(found[key], value)] == []
    return [choice for *_, choice in with_it]


ALL = {"policy": "recompute"}
SOME = {"policy": "auto", "memory": "40KiB"}


@pytest.mark.costly
@pytest.mark.parametrize("name", [*families.FAMILIES, *families.ENCODERS_AND_DECODERS])
@pytest.mark.parametrize("stages", [1, 2])
def test_models_of_every_kind_train_to_the_same_bits(name, stages):
    choices = compare(name, stages, families.config(0, GAS, stages), ALL)
    assert all(choice.blocks and choice.recomputed == choice.blocks for choice in choices)


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_choose_for_the_micro_batches_that_are_alive(stage, schedule, bf16):
    config = families.config(stage, GAS, 2, bf16=bf16, parallel={"schedule": schedule})
    memory = "24KiB" if bf16 else "44KiB"
    choices = compare("llama", 4, config, {"policy": "auto", "memory": memory})
    assert choices[0] == choices[1] and choices[2] == choices[3]
    assert [choice.live for choice in choices] == ([2, 2, 1, 1] if schedule == "1f1b" else [GAS] * 4)
    assert [choice.blocks for choice in choices[::2]] == [
        ["model.layers.0", "model.layers.1"],
        ["model.layers.2", "model.layers.3"],
    ]
    assert choices[0].recomputed and choices[0].predicted_bytes <= choices[0].budget_bytes


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("activations", [ALL, SOME], ids=["recompute", "auto"])
def test_ranks_that_share_layers_recompute_alike(stage, stages, activations):
    config = families.config(stage, GAS, stages)
    config["parallel"] = {**config.get("parallel", {}), "tensor": 2}
    if activations is SOME:
        activations = SOME | {"memory": "30KiB"}
    choices = compare("gpt2", 2 * stages, config, activations)
    assert all(one == other for one, other in zip(choices[::2], choices[1::2], strict=True))
    assert choices[0].recomputed


def test_a_loop_of_the_programs_own_recomputes_too():
    def loop(world, activations):
        config = families.config(1, GAS, 2) | ({"activation_checkpointing": activations} if activations else {})
        engine = deeptide.initialize(model=families.make("llama"), config=config, world=world)[0]
        losses = []
        for batch in families.batches("llama", 0, 1, 2, GAS):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.activation_checkpointing()

    found, without = run_ranks(2, loop, SOME), run_ranks(2, loop, None)
    assert [losses for losses, _ in found] == [losses for losses, _ in without]
    assert all(not choice.is_pending for _, choice in found)


def test_each_stage_measures_anew_after_a_load_or_takes_its_own_choice(tmp_path):
    def run(world, loads):
        config = families.config(1, GAS, 2) | {"activation_checkpointing": SOME | {"memory": "44KiB"}}
        engine = deeptide.initialize(model=families.make("llama"), config=config, world=world)[0]
        if loads:
            engine.load_checkpoint(str(tmp_path))
        engine.train_batch(families.batches("llama", 0, 1, 1, GAS))
        if not loads:
            engine.save_checkpoint(str(tmp_path))
        return engine.activation_checkpointing()

    saved, loaded = run_ranks(2, run, False), run_ranks(2, run, True)
    assert saved[0] == loaded[0]
    assert saved[1].blocks == loaded[1].blocks and not loaded[1].is_pending


# -- models of Transformers -------------------------------------------------------------------------------------------


def test_a_models_own_recomputation_is_not_doubled():
    model = families.make("llama")
    config = families.config(0, 1) | {"activation_checkpointing": ALL}
    text = "LlamaForCausalLM's own recomputation is on, and each block would be computed twice"
    model.gradient_checkpointing_enable()
    world = deeptide.make_world(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(deeptide.ConfigError, match=text):
        deeptide.initialize(model=model, config=config, world=world)
    model.gradient_checkpointing_disable()
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    batch = next(families.batches("llama", 0, 1, 1, 1))
    model.train()
    engine(**batch)
    model.gradient_checkpointing_enable()
    with pytest.raises(deeptide.ConfigError, match=text):
        engine(**batch)
    engine.destroy()


def test_a_cache_of_earlier_tokens_is_refused_and_an_empty_one_left_out():
    transformers = pytest.importorskip("transformers")
    config = families.config(0, 1) | {"activation_checkpointing": ALL}
    world = deeptide.make_world(torch.distributed.HashStore(), 0, 1)
    engine = deeptide.initialize(model=families.make("llama"), config=config, world=world)[0]
    batch = next(families.batches("llama", 0, 1, 1, 1))
    loss = engine(**batch, use_cache=True).loss
    engine.backward(loss)
    assert loss.item() == engine(**batch, use_cache=False).loss.item()
    with torch.no_grad():
        cache = engine(input_ids=batch["input_ids"], use_cache=True).past_key_values
    assert isinstance(cache, transformers.cache_utils.Cache)
    with pytest.raises(deeptide.ConfigError, match=r"layers\.0 is called with the keys and values of \d+ earlier"):
        engine(input_ids=batch["input_ids"], past_key_values=cache)
    engine.destroy()


def test_layers_of_a_pipeline_module_have_their_own_interval():
    import stages

    from deeptide.pipeline import PipelineModule

    world = deeptide.make_world(torch.distributed.HashStore(), 0, 1)
    model = PipelineModule(stages.layers(), num_stages=1, loss_fn=stages.loss_of, world=world)
    with pytest.raises(deeptide.ConfigError, match="a PipelineModule recomputes by its own argument"):
        deeptide.initialize(model=model, config=families.config(0, 1) | {"activation_checkpointing": ALL}, world=world)


@pytest.mark.costly
@pytest.mark.parametrize("activations", [ALL, {"policy": "auto", "memory": "60KiB"}])
@pytest.mark.parametrize("stage", [0, 3])
def test_chunks_of_a_stage_recompute_too(stage, activations):
    config = families.config(stage, GAS, 2, parallel={"schedule": "interleaved"})
    choices = compare("llama", 2, config, activations)
    assert [choice.blocks for choice in choices] == [[f"model.layers.{n}" for n in (s, s + 2)] for s in (0, 1)]
    assert all(choice.recomputed for choice in choices)
    assert [choice.live for choice in choices] == [3, 2]
