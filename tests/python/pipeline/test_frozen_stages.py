# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stages without a trained parameter, or without any, train with the others as the uncut model does."""

import functools
import math
import time

import families
import pytest
import stages
import torch
from conftest import run_ranks
from test_pipeline import compare

import deeptide
from deeptide.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deeptide.pipeline.passing.letters import tensors_in

STEPS, GAS = 3, 4

TRAINED = {  # layers, of an embedding, six blocks and a head
    "last": {5, 6, 7},  # three stages: the first two train nothing
    "middle": {4},
    "ends": {0, 7},
    "first": {0, 1},
}


def freeze(model, trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.split(".")[0]) in trained)
    return model


def sends_of(engine):
    """The letters that this stage sends: (kind, number of tensors)."""
    letters, sent = engine._run._letters, []
    send = letters.send

    def noted(subject, tree, to):
        sent.append((subject.kind, len(tensors_in(tree))))
        send(subject, tree, to)

    letters.send = noted
    return sent


def train(world, num_stages, chunks, trained, settings):
    model = stages.Uncut()
    if num_stages:
        model = PipelineModule(
            stages.layers(), num_stages, loss_fn=stages.loss_of, chunks=chunks, partition_method="uniform", world=world
        )
    engine = deeptide.initialize(model=freeze(model, trained), config=settings, world=world)[0]
    sent = sends_of(engine) if num_stages else []
    given = stages.batches(
        engine.data_parallel_rank if num_stages else world.rank, world.size // max(num_stages, 1), STEPS, GAS
    )
    losses, norms, states = stages.train(engine, given, STEPS, *(() if num_stages else (stages.loss_of,)))
    norms = [-1.0 if math.isnan(norm) else norm for norm in norms]  # of a step that fp16 skipped
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * GAS)
    return losses, norms, states, sent


def both(num_stages, data_size, trained, settings, chunks=1):
    cut = run_ranks(num_stages * data_size, train, num_stages, chunks, trained, settings)
    compare([rank[:3] for rank in cut], [run_ranks(data_size, train, 0, 1, trained, settings)[0][:3]])
    return [rank[3] for rank in cut]


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(3, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("trained", list(TRAINED))
def test_frozen_stages_train_as_the_uncut_model(trained, mesh, stage):
    settings = stages.config(stage, GAS, gradient_clipping=0.0)
    sent = both(*mesh, TRAINED[trained], settings)
    # No gradient goes to a stage behind which nothing trains.
    for rank, letters in enumerate(sent):
        needed = min(TRAINED[trained]) < [0, 3, 6][rank // mesh[1]]
        counts = {count for kind, count in letters if kind == "gradient"}
        assert counts == (set() if rank < mesh[1] else {1} if needed else {0})


@pytest.mark.parametrize("more", ["clipped", "bf16", "fp16", "zero_bubble", "chunks", "files"])
def test_a_frozen_first_stage_goes_with(more, tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    settings = {
        "clipped": stages.config(2, GAS, gradient_clipping=0.05),
        "bf16": stages.config(3, GAS, bf16=True, gradient_clipping=0.0),
        "fp16": stages.config(
            1, GAS, fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1}, gradient_clipping=0.0
        ),
        "zero_bubble": stages.config(1, GAS, gradient_clipping=0.0, parallel={"schedule": "zero_bubble"}),
        "chunks": stages.config(1, GAS, gradient_clipping=0.0),
        "files": stages.config(2, GAS, gradient_clipping=0.0, zero=offload),
    }[more]
    if more == "chunks":  # of two layers each: stage 0 has 0, 1, 4 and 5
        both(2, 2, {2, 3, 7}, settings, chunks=2)
    else:
        both(2, 2, {5, 6, 7}, settings)


def to_hidden(tokens):
    """A stage of functions alone."""
    hidden = torch.nn.functional.one_hot(tokens, stages.VOCABULARY)[..., : stages.WIDTH].float()
    return {"hidden": hidden, "more": ((tokens > 2).long().unsqueeze(-1), 0)}


def doubled(given):
    return given | {"hidden": 2 * given["hidden"]}


def to_logits(given):
    return torch.nn.functional.pad(given["hidden"], (0, stages.VOCABULARY - stages.WIDTH))


def block(number):
    return LayerSpec(stages.Block, number)


FUNCTIONS = {
    "first": lambda: [to_hidden, doubled, block(0), block(1), doubled, to_logits],
    "last": lambda: [LayerSpec(stages.Embedding), block(0), block(1), block(2), doubled, to_logits],
    "middle": lambda: [LayerSpec(stages.Embedding), block(1), doubled, doubled, block(2), to_logits],
}


def train_functions(world, name, num_stages, stage):
    model = PipelineModule(
        FUNCTIONS[name](), num_stages, loss_fn=stages.loss_of, partition_method="uniform", world=world
    )
    engine = deeptide.initialize(model=model, config=stages.config(stage, GAS, gradient_clipping=0.0), world=world)[0]
    return stages.train(engine, stages.batches(world.rank % 2, 2, STEPS, GAS), STEPS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_stage_may_have_no_parameter_at_all(name, stage):
    uncut = run_ranks(2, train_functions, name, 1, stage)
    assert uncut[0][2] and uncut[0][0][0] != uncut[0][0][2]
    compare(run_ranks(6, train_functions, name, 3, stage), uncut)


def lends_only(world, num_stages):
    """The last stage has nothing but what it borrows."""
    head = TiedLayerSpec("embedding", stages.Embedding, forward_fn=stages.tied_logits)
    layers = [TiedLayerSpec("embedding", stages.Embedding), LayerSpec(stages.Block, 0), doubled, head]
    model = PipelineModule(layers, num_stages, loss_fn=stages.loss_of, partition_method="uniform", world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, GAS, gradient_clipping=0.0), world=world)[0]
    return stages.train(engine, stages.batches(0, 1, STEPS, GAS), STEPS)


def test_a_stage_may_have_borrowed_weights_alone():
    compare(run_ranks(2, lends_only, 2), run_ranks(1, lends_only, 1), exact=False)


# -- models as they are -----------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank addition, as LoRA's."""

    def __init__(self, base, number):
        super().__init__()
        self.base = base
        linear = functools.partial(torch.nn.utils.skip_init, torch.nn.Linear)  # no draw: other ranks are threads
        self.down, self.up = linear(base.in_features, 2), linear(2, base.out_features)
        stages.drawn(self.down, 50 + number)
        stages.drawn(self.up, 60 + number)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters_on(blocks):
    def edit(model):
        model.requires_grad_(False)
        for number in blocks:
            attention = model.model.layers[number].self_attn
            attention.q_proj = Adapted(attention.q_proj, number)
        return model

    return edit


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("blocks", [(3,), (0,), (1, 2)], ids=str)
def test_adapters_on_some_blocks_of_a_model_as_it_is(blocks, stage):
    for num_stages, more in ((2, {}), (4, {}), (2, {"parallel": {"schedule": "interleaved"}})):
        cut = run_ranks(
            num_stages * 2,
            families.train,
            "llama",
            families.config(stage, GAS, num_stages, **more),
            GAS,
            STEPS,
            adapters_on(blocks),
        )
        settings = families.config(stage, GAS)
        compare(cut, run_ranks(2, families.train, "llama", settings, GAS, STEPS, adapters_on(blocks)))


def own_loop(world, num_stages):
    engine = deeptide.initialize(
        model=adapters_on((3,))(families.make("llama")), config=families.config(2, 2, num_stages), world=world
    )[0]
    losses = []
    for batch in families.batches("llama", engine.data_parallel_rank, engine.data_parallel_size, STEPS, 2):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [engine.get_global_grad_norm()], families.states_of(engine)


def test_the_programs_own_loop_runs_a_frozen_stage():
    cut, uncut = run_ranks(4, own_loop, 2), run_ranks(2, own_loop, 0)
    for data_rank in range(2):  # a loss is that of the rank's own batch
        compare(cut[data_rank::2], uncut[data_rank:])


# -- optimizers and checkpoints ---------------------------------------------------------------------------------------


def grouped(kind, model):
    """Two groups, of which the stage may have neither."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "groups":
        return {"model_parameters": groups}
    return {"optimizer": getattr(torch.optim, kind)(groups, lr=1e-2)}


def resume(world, kind, num_stages, folder, loads):
    settings = families.config(1, 2, num_stages)
    if kind == "muon":
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2}}
    model = adapters_on((2, 3))(families.make("llama"))
    given = grouped(kind, model) if kind not in ("muon", "configured") else {}
    if kind in ("AdamW", "NAdam"):
        del settings["optimizer"]
    engine = deeptide.initialize(model=model, config=settings, world=world, **given)[0]
    batches = families.batches("llama", engine.data_parallel_rank, engine.data_parallel_size, 4, 2)
    if loads:
        engine.load_checkpoint(folder)
        for _ in range(4):
            next(batches)
    losses = [engine.train_batch(batches).item() for _ in range(2)]
    if not loads:
        engine.save_checkpoint(folder)
        losses = [engine.train_batch(batches).item() for _ in range(2)]
    return losses, [engine.get_global_grad_norm()], families.states_of(engine)


@pytest.mark.parametrize("kind", ["configured", "groups", "AdamW", "NAdam", "muon"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 0)), ((1, 0), (2, 2))], ids=str)
def test_a_checkpoint_of_a_frozen_stage_loads_elsewhere(kind, saved, loaded, tmp_path):
    before = run_ranks(saved[0], resume, kind, saved[1], str(tmp_path), False)
    after = run_ranks(loaded[0], resume, kind, loaded[1], str(tmp_path), True)
    cut, uncut = (after, before) if loaded[1] else (before, after)
    compare(cut, uncut, exact=kind != "muon")


# -- nothing trains ---------------------------------------------------------------------------------------------------


def refuse(world, plain):
    begin = time.monotonic()
    if plain:
        model, settings = families.make("llama").requires_grad_(False), families.config(0, GAS, 2)
    else:
        model = PipelineModule(stages.layers(), 2, loss_fn=stages.loss_of, world=world).requires_grad_(False)
        settings = stages.config(0, GAS)
    with pytest.raises(ValueError, match=r"no trainable parameters .* on all of each of its 2 stages"):
        deeptide.initialize(model=model, config=settings, world=world)
    return time.monotonic() - begin


@pytest.mark.parametrize("plain", [False, True])
def test_all_stages_frozen_are_refused_on_all_ranks(plain):
    assert len(run_ranks(4, refuse, plain)) == 4
