# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model of anybody's, cut along its blocks by "parallel": {"pipeline": N}, trains as it does uncut."""

import copy
import importlib
import json
import os
import signal
import time
import weakref

import families
import pytest
import torch
import torch.utils.checkpoint
from conftest import run_processes, run_ranks

import deeptide
from deeptide.pipeline.engine import PipelineEngine

STEPS, GAS = 3, 4


def compare(cut, uncut, exact):
    found = {}
    for rank, (losses, norms, states) in enumerate(cut):
        first = rank % len(uncut) == 0
        assert states and not (first and found.keys() & states.keys())  # each state on one stage alone
        assert losses == pytest.approx(uncut[0][0], rel=0 if exact else 1e-5)
        assert norms == pytest.approx(uncut[0][1], rel=1e-12 if exact else 1e-4)
        found |= states
    assert found.keys() == uncut[0][2].keys()
    for name, value in uncut[0][2].items():
        if exact:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


def both(name, num_stages, data_size, stage=0, gas=GAS, edit=None, **more):
    cut = run_ranks(
        num_stages * data_size, families.train, name, families.config(stage, gas, num_stages, **more), gas, STEPS, edit
    )
    more.pop("parallel", None)
    return cut, run_ranks(data_size, families.train, name, families.config(stage, gas, **more), gas, STEPS, edit)


@pytest.mark.costly
@pytest.mark.parametrize("name", list(families.FAMILIES))
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_model_as_it_is_trains_as_the_uncut_one_bit_for_bit(name, num_stages):
    """But for weights that two stages use, whose gradients are added over the micro-batches first."""
    compare(*both(name, num_stages, 1), exact=name not in (*families.TIED, *families.SPREAD))


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("gas", [1, GAS])
def test_a_stage_of_several_ranks_shards_by_zero(stage, schedule, bf16, gas):
    compare(*both("llama", 2, 2, stage, gas, bf16=bf16, parallel={"schedule": schedule}), exact=True)


def test_a_model_in_bf16_has_its_masks_in_bf16_too():
    compare(*both("mistral", 3, 1, bf16=True), exact=True)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_torch_alone_gives_the_same_updates(name):
    model = families.make(name)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    given = families.batches(name, 0, 1, STEPS, GAS)
    for _ in range(STEPS):
        for _ in range(GAS):
            (model(**next(given)).loss / GAS).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
    settings = families.config(0, GAS, 2, **own)
    for _, _, states in run_ranks(2, families.train, name, settings, GAS, STEPS, None):
        for key, value in states.items():
            if key.endswith("/master"):
                start = before[key.removesuffix("/master")]
                torch.testing.assert_close(
                    value - start, model.state_dict()[key.removesuffix("/master")] - start, rtol=1e-3, atol=2e-4
                )


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save(world, num_stages, folder, name):
    engine = deeptide.initialize(model=families.make(name), config=families.config(1, 2, num_stages), world=world)[0]
    given = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 4, 2)
    for _ in range(2):
        engine.train_batch(given)
    engine.save_checkpoint(folder)
    states = families.states_of(engine)
    return states, [engine.train_batch(given).item() for _ in range(2)], dict(engine.module.named_buffers())


def load(world, num_stages, folder, name):
    model = families.make(name, seed=7)
    engine = deeptide.initialize(model=model, config=families.config(1, 2, num_stages), world=world)[0]
    assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == 2
    given = families.batches(name, engine.data_parallel_rank, engine.data_parallel_size, 4, 2)
    for _ in range(4):
        next(given)
    states = families.states_of(engine)
    return states, [engine.train_batch(given).item() for _ in range(2)], dict(engine.module.named_buffers())


@pytest.mark.parametrize("name", ["plain", "qwen3"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 0)), ((1, 0), (2, 2)), ((4, 2), (3, 3))], ids=str)
def test_a_checkpoint_has_the_names_of_the_uncut_model(saved, loaded, name, tmp_path):
    before = run_ranks(saved[0], save, saved[1], str(tmp_path), name)
    after = run_ranks(loaded[0], load, loaded[1], str(tmp_path), name)
    whole = {key: value for states, _, _ in before for key, value in states.items()}
    again = {key: value for states, _, _ in after for key, value in states.items()}
    uncut = {f"{key}/{role}" for key, _ in families.make(name).named_parameters() for role in families.ROLES}
    assert whole.keys() == again.keys() == uncut
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    if saved[0] == 2 or loaded[0] == 2:  # the same batches
        for _, losses, buffers in after:
            assert losses == pytest.approx(before[0][1], rel=1e-5)
            for key, buffer in buffers.items():
                torch.testing.assert_close(buffer, {k: v for _, _, b in before for k, v in b.items()}[key])


# -- what goes with it ------------------------------------------------------------------------------------------------


def with_adapters(model):
    import peft

    with families._seeding:
        torch.manual_seed(9)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_train_on_all_stages(stage):
    compare(*both("llama", 2, 1, stage, edit=with_adapters), exact=True)


def recomputing(use_reentrant):
    def edit(model):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return model

    return edit


class CheckpointsCalls(torch.nn.Module):
    """Recomputes a block from the outside: its call, and not its forward."""

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, input_ids, labels):
        plain = self.plain
        hidden = plain.embed(input_ids)
        mask = (input_ids > 2).unsqueeze(-1)
        for block in plain.blocks:
            hidden, _ = torch.utils.checkpoint.checkpoint(block, hidden, mask, 1.0, use_reentrant=False)
        return torch.nn.functional.cross_entropy(plain.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.both_ways
def test_blocks_are_recomputed(use_reentrant):
    compare(*both("llama", 2, 1, 3, edit=recomputing(use_reentrant)), exact=True)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_checkpoint_around_a_blocks_call_finds_what_it_was_handed(schedule):
    compare(*both("plain", 3, 1, edit=CheckpointsCalls, parallel={"schedule": schedule}), exact=False)


def without_memory(world, deferred):
    with families._seeding, deeptide.zero.Init(enabled=deferred):
        torch.manual_seed(3)
        model = families.FAMILIES["llama"]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = [(names[id(parameter)], weakref.ref(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": list(model.model.parameters())}, {"params": [model.lm_head.weight], "lr": 0.1}], lr=1e-2
    )
    engine = deeptide.initialize(
        model=model, optimizer=optimizer, config=families.config(3, GAS, 2, optimizer=None), world=world
    )[0]
    own = [name for name, _ in model.named_parameters()]
    assert isinstance(engine, PipelineEngine) and engine.num_stages == 2 and engine.mesh["pipe"] == 2
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert {name for name, parameter in seen if parameter() is not None} == set(own)
    assert model.lm_head.weight.shape == (families.VOCABULARY, 16)  # on each stage, with bytes on the last
    given = families.batches("llama", 0, 1, STEPS, GAS)
    return own, [engine.train_batch(given).item() for _ in range(STEPS)], [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("deferred", [False, True])
def test_parameters_of_other_stages_have_no_memory(deferred):
    first, last = run_ranks(2, without_memory, deferred)
    assert "model.embed_tokens.weight" in first[0] and "lm_head.weight" in last[0] and not set(first[0]) & set(last[0])
    assert first[1] == last[1] == run_ranks(2, without_memory, not deferred)[0][1] and first[1][2] != first[1][0]
    assert first[2] == last[2] == [1e-2, 0.1]


def evaluate(world, num_stages):
    engine = deeptide.initialize(model=families.make("bert"), config=families.config(1, 2, num_stages), world=world)[0]
    given = lambda: families.batches("bert", 0, 1, STEPS, 2)  # noqa: E731
    mean = engine.eval_batch(given()).item()
    losses, outputs = engine.eval_batch(given(), return_logits=True, reduce_output=None, num_micro_batches=3)
    by_hand = engine.eval_batch(
        given(), loss_fn=lambda output, labels: output.logits.float().square().mean() + labels.float().mean() * 0
    )
    engine.train_batch(given())
    return mean, [loss.item() for loss in losses], outputs, by_hand.item(), engine.eval_batch(given()).item()


def test_an_evaluation_gives_losses_everywhere_and_outputs_on_the_last_stage():
    uncut = run_ranks(1, evaluate, 0)[0]
    for rank, (mean, losses, outputs, by_hand, after) in enumerate(run_ranks(2, evaluate, 2)):
        assert (mean, losses, by_hand) == (uncut[0], uncut[1], uncut[3])
        assert after == pytest.approx(uncut[4], rel=1e-5) != mean
        assert outputs is None if rank == 0 else all(torch.equal(a.logits, b.logits) for a, b in zip(outputs, uncut[2]))


def train_process(num_stages, dropout):
    """A script for DeepSpeed, whose model is Transformers' as it is."""
    importlib.import_module("deeptide.as_deepspeed")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    model = families.make("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    torch.manual_seed(20 + torch.distributed.get_rank())
    engine, _, _, _ = deepspeed.initialize(
        model=model, config=families.config(1, GAS, num_stages), model_parameters=model.parameters()
    )
    assert engine.is_pipe_parallel() and engine.dp_world_size == 1
    given = families.batches("gpt2", 0, 1, STEPS, GAS)
    print(json.dumps([engine.train_batch(data_iter=given).item() for _ in range(STEPS)]))


@pytest.mark.costly
def test_dropout_draws_from_the_generator_of_the_stage_that_has_it():
    runs = [
        [json.loads(each.stdout.splitlines()[-1]) for each in run_processes(2, train_process, 2, dropout)]
        for dropout in (0.5, 0.5, 0.0)
    ]
    assert runs[0][0] == runs[0][1] == runs[1][0] and runs[2][0] != runs[0][0]
    whole = run_ranks(1, families.train, "gpt2", families.config(1, GAS), GAS, STEPS, None)[0]
    assert runs[2][0] == pytest.approx(whole[0], rel=1e-5)


def slowly(world, slow):
    engine = deeptide.initialize(model=families.make("plain"), config=families.config(1, GAS, 3), world=world)[0]
    if world.rank == slow:
        block = engine.module.blocks[engine._cut.parts[slow]]
        block.register_forward_pre_hook(lambda module, args: time.sleep(0.05))
        block.up.weight.register_hook(lambda gradient: time.sleep(0.05))
    given = families.batches("plain", 0, 1, STEPS, GAS)
    return [engine.train_batch(given).item() for _ in range(STEPS)], engine.get_global_grad_norm()


@pytest.mark.costly
def test_a_slow_stage_does_no_harm():
    expected = run_ranks(3, slowly, None)
    assert run_ranks(3, slowly, 0) == run_ranks(3, slowly, 1) == run_ranks(3, slowly, 2) == expected


def lose_a_rank(victim):
    engine = deeptide.initialize(model=families.make("plain"), config=families.config(1, GAS, 2))[0]
    given = families.batches("plain", engine.data_parallel_rank, 2, 3, GAS)
    engine.train_batch(given)
    if engine.global_rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        engine.train_batch(given)
    except deeptide.CommError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(3)


@pytest.mark.costly
def test_all_stages_hear_of_a_rank_that_was_killed():
    done = run_processes(4, lose_a_rank, 0, check=False)
    assert [process.returncode for process in done] == [-9, 3, 3, 3]
    assert any("rank 0" in json.loads(process.stdout.splitlines()[-1]) for process in done[1:])


def not_finite(world, bad_stage):
    engine = deeptide.initialize(model=families.make("llama"), config=families.config(2, GAS, 2), world=world)[0]
    given = families.batches("llama", engine.data_parallel_rank, 2, STEPS, GAS)
    engine.train_batch(given)
    before = families.states_of(engine)
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "down_proj" in n)
    is_bad = engine.stage_id == bad_stage and engine.data_parallel_rank == 1
    hook = parameter.register_hook(lambda gradient: gradient * float("inf")) if is_bad else None
    engine.train_batch(given)
    outcome = engine._outcome
    if hook is not None:
        hook.remove()
    assert engine.skipped_steps == 1
    assert all(torch.equal(value, before[key]) for key, value in families.states_of(engine).items())
    assert engine.train_batch(given).isfinite()
    return name, outcome.parameter, outcome.rank


@pytest.mark.parametrize("bad_stage", [0, 1])
def test_all_stages_skip_and_name_layer_and_rank(bad_stage):
    results = run_ranks(4, not_finite, bad_stage)
    assert {result[1:] for result in results} == {(results[2 * bad_stage][0], 2 * bad_stage + 1)}


# -- values besides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_blocks_are_given_besides_travels_at_every_schedule(schedule, stage):
    """A choice of integers, and a value with a gradient that goes to all blocks."""
    compare(*both("picks", 2, 2, stage, parallel={"schedule": schedule}), exact=False)


def look(world, num_stages):
    model = families.make("picks")
    engine = deeptide.initialize(model=model, config=families.config(0, GAS, num_stages), world=world)[0]
    return engine.eval_batch(families.batches("picks", 0, 1, 1, GAS)).item()


def test_what_blocks_are_given_besides_travels_without_gradients():
    assert run_ranks(3, look, 3) == pytest.approx(run_ranks(1, look, 0) * 3)
