# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A plan's forecast of a step beside engines that run it: activations, transfers, and the recommended mesh."""

import contextlib
import functools
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide._commands import plan as plan_command
from deeptide._forecast import measure
from deeptide._forecast.gpt import GPT
from deeptide._forecast.meshes import Search
from deeptide._forecast.plan_mesh import bounds_of
from deeptide._forecast.steps import Order, Rates
from deeptide.config import load_config
from deeptide.pipeline.schedules import StageCosts, simulate

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("pipeline", "tensor")]
import meshes

GAS = 4
MESHES = [(1, 1, 1), (2, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 4)]  # pipeline, tensor, ranks


def batch_of():
    tokens = torch.arange(12).view(2, 6) % meshes.families.VOCABULARY
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def settings_of(kind, stage, pipeline, tensor, bf16, **more):
    deep = {"shared_memory": False}
    return meshes.config(kind, stage, pipeline, tensor, GAS, bf16=bf16, deeptide=deep, **more)


def make(kind):
    """Attention in plain operators: Transformers leaves masks out only where it may look at values."""
    model = meshes.make(kind)
    model.set_attn_implementation("eager")
    return model


@contextlib.contextmanager
def engine_of(world, kind, settings):
    engine = deeptide.initialize(model=make(kind), config=settings, world=world)[0]
    try:
        engine.train_batch(iter([batch_of()] * GAS))
        engine.train_batch(iter([batch_of()] * GAS))
        yield engine
    finally:
        engine.destroy()


def stage_of(world, pipeline):
    return world.rank // (world.size // pipeline)


def kept(world, kind, pipeline, settings):
    policy = {"activation_checkpointing": {"policy": "auto", "memory": "1GiB"}}
    with engine_of(world, kind, {**settings, **policy}) as engine:
        choice = engine.activation_checkpointing()
        return stage_of(world, pipeline), choice.live, choice.kept_bytes, choice.least_bytes


@pytest.mark.costly
@pytest.mark.parametrize(("pipeline", "tensor", "ranks"), MESHES)
@pytest.mark.parametrize(("kind", "bf16"), [("gpt2", False), ("llama", True), ("qwen3", False)])
def test_activations_are_what_the_engine_measures(kind, bf16, pipeline, tensor, ranks):
    settings = settings_of(kind, 1, pipeline, tensor, bf16)
    model = make(kind)
    again = {**settings, "activation_checkpointing": {"policy": "recompute"}}
    plan = deeptide.plan(model, settings, ranks, 1, batch=batch_of())
    plain = plan.step.stages
    least = deeptide.plan(model, again, ranks, 1, batch=batch_of()).step.stages
    for stage, live, most, fewest in run_ranks(ranks, kept, kind, pipeline, settings):
        assert plain[stage].live == live
        # The engine counts weights that another stage lends with what is kept, where torch keeps them, which it does
        # not for products whose weights' gradients come by themselves. The plan names such weights apart.
        is_kept = pipeline > 1 and tensor == 1
        lent = live * (2 if bf16 else 4) * (plan.lent[stage] if is_kept else 0)
        assert plain[stage].activation_bytes + lent == pytest.approx(most, rel=0.05)
        assert least[stage].activation_bytes + lent == pytest.approx(fewest, rel=0.05)


def received(engine):
    return sum(line.bytes * line.count for line in engine._core.collectives() if line.operation == "receive")


def letters(world, kind, settings):
    with engine_of(world, kind, settings) as engine:
        before = received(engine)  # a rank waits for what it receives, and not for what it sends
        engine.train_batch(iter([batch_of()] * GAS))
        return received(engine) - before


@pytest.mark.parametrize(("pipeline", "ranks"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize(("schedule", "bf16"), [("1f1b", True), ("gpipe", False), ("interleaved", False)])
def test_letters_between_stages_are_what_the_table_counts(pipeline, ranks, schedule, bf16):
    chunks = {"schedule": schedule, **({"chunks": 4 // pipeline} if schedule == "interleaved" else {})}
    settings = settings_of("llama", 1, pipeline, 1, bf16, parallel=chunks, comms_logger={"enabled": True})
    planned = deeptide.plan(make("llama"), settings, ranks, 1, batch=batch_of()).step.stages
    sent = [each.between_bytes for stage in planned for each in stage.transfers if "activation" in each.kind]
    assert len(sent) == 2 * (pipeline - 1) + (2 if schedule == "interleaved" and pipeline == 2 else 0)
    assert sum(sent) * ranks // pipeline == pytest.approx(sum(run_ranks(ranks, letters, "llama", settings)), rel=0.05)


class Counted:
    """The ranks that share layers, and the bytes that one sends to the others."""

    def __init__(self, core):
        self._core, self.bytes = core, 0

    def __getattr__(self, name):
        return getattr(self._core, name)

    def all_reduce(self, tensor, phase):
        self.bytes += tensor.nbytes * 2 * (self._core.size - 1) // self._core.size
        return self._core.all_reduce(tensor, phase)

    def start_all_reduce(self, tensor, phase):
        self.bytes += tensor.nbytes * 2 * (self._core.size - 1) // self._core.size
        return self._core.start_all_reduce(tensor, phase)

    def all_gather(self, tensor, phase):
        if tensor.numel() > 1:  # a loss that is compared in the first steps
            self.bytes += tensor.nbytes * (self._core.size - 1)
        return self._core.all_gather(tensor, phase)


def inside_layers(world, kind, pipeline, settings):
    with engine_of(world, kind, settings) as engine:
        team = engine.tensor_team
        team.core = counted = Counted(team.core)
        engine.train_batch(iter([batch_of()] * GAS))
        team.core = counted._core
        return stage_of(world, pipeline), counted.bytes


@pytest.mark.costly
@pytest.mark.parametrize(("pipeline", "tensor", "ranks"), [(1, 2, 2), (2, 2, 4), (1, 4, 4)])
@pytest.mark.parametrize("policy", ["none", "recompute"])
def test_sums_inside_layers_are_what_layers_send(pipeline, tensor, ranks, policy):
    kind = "llama-8"
    settings = settings_of(kind, 1, pipeline, tensor, False, activation_checkpointing={"policy": policy})
    planned = deeptide.plan(make(kind), settings, ranks, ranks, batch=batch_of()).step.stages
    for stage, counted in run_ranks(ranks, inside_layers, kind, pipeline, settings):
        (forecast,) = [each for each in planned[stage].transfers if each.kind == "tensor"]
        assert forecast.within_bytes == pytest.approx(counted, rel=0.05)
        assert forecast.between_bytes == 0


def reductions(world, kind, settings):
    with engine_of(world, kind, settings) as engine:
        for _ in range(GAS):
            engine.backward(engine(**batch_of()).loss)
            outcome = engine._core.step()
        return outcome.sent_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_reductions_and_gathers_are_what_a_step_sends(kind, stage):
    settings = settings_of(kind, stage, 1, 1, False)
    planned = deeptide.plan(make(kind), settings, 2, 1).core.transfers
    forecast = sum(each.between_bytes for each in planned)
    for counted in run_ranks(2, reductions, kind, settings):
        assert forecast == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("by_parts", [False, True])
def test_blocks_that_are_passed_over_have_the_figures_that_they_would_have(by_parts, monkeypatch):
    config = load_config(settings_of("llama", 1, 1, 2, False, parallel={"sequence_parallel_norms": by_parts}))
    model = meshes.make("llama-8")
    names, _ = bounds_of(model, 1, 1)
    short = measure.measured(model, config, names, batch_of(), 2)
    monkeypatch.setattr(measure._Run, "_passes", lambda *arguments: False)
    assert short == measure.measured(model, config, names, batch_of(), 2)


def test_a_plan_knows_that_ranks_keep_parts_of_the_positions():
    model, kept = meshes.make("llama-8"), []
    names, _ = bounds_of(model, 1, 1)
    for by_parts in (False, True):
        config = load_config(settings_of("llama", 1, 1, 2, False, parallel={"sequence_parallel_norms": by_parts}))
        block = measure.measured(model, config, names, batch_of(), 2).blocks[1]
        kept.append((block.handed, block.kept.bytes))
    assert kept[1][0] == kept[0][0] // 2
    assert kept[1][1] < 0.8 * kept[0][1]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2)])
@pytest.mark.parametrize("micro_batches", [8, 37, 64])
def test_a_long_step_takes_what_the_simulator_says_of_all_of_it(schedule, chunks, micro_batches):
    order, costs = Order(schedule, micro_batches, chunks), StageCosts(1.0, 1.1, 0.9, 0.05)
    time, bubble = order.simulate(4, costs)
    whole = simulate(meshes_schedule(schedule), 4, micro_batches, chunks, costs)
    assert time == pytest.approx(whole.time, rel=0.01)
    assert bubble == pytest.approx(whole.bubble, abs=0.01)
    assert [order.alive(4, stage) for stage in range(4)] == [-(-peak // chunks) for peak in whole.peak_activations]


def meshes_schedule(name):
    from deeptide.pipeline.schedules import SCHEDULES

    return SCHEDULES[name]


# -- the search -------------------------------------------------------------------------------------------------------


def search(memory, on_host=4, ranks=4, rates=None, train=16, **more):
    with deeptide.zero.Init():
        model = GPT(8, 64, 4, 128)
    config = {
        "train_batch_size": train, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "deeptide": {"shared_memory": False}, **more,
    }  # fmt: skip
    tokens = torch.zeros(1, 32, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return Search(model, load_config(config), ranks, on_host, batch, rates or Rates()).run(memory)


@functools.cache
def everything():
    return search(1 << 30)


@pytest.mark.costly
def test_the_fastest_mesh_that_fits_is_recommended():
    roomy = everything()
    assert [choice.step.seconds for choice in roomy] == sorted(choice.step.seconds for choice in roomy)
    assert all(choice.bytes <= 1 << 30 and not choice.why_not for choice in roomy)
    tight = search(roomy[0].bytes - 1)
    assert tight[0].bytes < roomy[0].bytes
    assert tight[0].step.seconds >= roomy[0].step.seconds


@pytest.mark.costly
def test_what_no_mesh_fits_says_what_is_missing():
    (nearest,) = search(100_000)
    assert nearest.step is None
    assert nearest.why_not.startswith("lacks ")
    assert nearest.bytes > 100_000
    assert all(nearest.bytes <= choice.bytes for choice in everything())


@pytest.mark.costly
def test_slow_links_between_hosts_are_left_to_what_sends_least():
    slow = search(1 << 30, on_host=2, rates=Rates(between=1e6))[0]
    fast = search(1 << 30, on_host=2, rates=Rates(between=1e12))[0]
    between = [
        max(sum(t.between_bytes for t in stage.transfers) for stage in choice.step.stages) for choice in (slow, fast)
    ]
    assert between[0] <= between[1]
    assert slow.mesh.pipeline > 1, "letters are smaller than gradients here"


def train_as_recommended(world, sections):
    model = GPT(8, 64, 4, 128)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **sections}
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    tokens = (torch.arange(32 * sections["train_micro_batch_size_per_gpu"]) * 7 % 128).view(-1, 32)
    batch = {"input_ids": tokens, "labels": tokens}
    count = sections["gradient_accumulation_steps"]
    losses = [float(engine.train_batch(iter([batch] * count))) for _ in range(3)]
    engine.destroy()
    return losses


@pytest.mark.costly
@pytest.mark.parametrize("rates", [Rates(), Rates(between=1e6)], ids=["fast", "slow"])
def test_what_is_recommended_trains(rates):
    first = search(1 << 30, on_host=2, rates=rates)[0]
    for losses in run_ranks(4, train_as_recommended, first.sections):
        assert losses[-1] < losses[0]


class Branching(nn.Module):
    """Looks at a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x if x.sum() > 0 else -x).mean()


def test_a_forward_that_needs_values_is_named():
    with pytest.raises(deeptide.ConfigError, match="the forward of Branching cannot run without memory"):
        deeptide.plan(Branching(), meshes.config("gpt2", 0, gas=1), batch=(torch.zeros(2, 4),))


class NoLoss(nn.Module):
    """Returns nothing that has a gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).argmax()


def test_a_forward_without_a_loss_is_named():
    with pytest.raises(deeptide.ConfigError, match="returns no loss"):
        deeptide.plan(NoLoss(), meshes.config("gpt2", 0, gas=1), batch=(torch.zeros(2, 4),))


def test_the_command_recommends_a_mesh(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam"}, "deeptide": {"shared_memory": false}}')
    given = ["--config", str(path), "--params", "300K", "--layers", "4", "--hidden", "64", "--vocab", "128"]
    assert plan_command.main([*given, "--num_ranks", "4", "--seq", "16"]) == 0
    assert "activations" in capsys.readouterr().out
    assert plan_command.main([*given, "--num_ranks", "4", "--seq", "16", "--mesh", "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert 'recommended: "zero_optimization"' in out or 'recommended: "parallel"' in out
    assert "the first: computing" in out
    assert plan_command.main([*given, "--num_ranks", "4", "--seq", "16", "--mesh", "--memory", "10KB"]) == 0
    assert "no mesh fits" in capsys.readouterr().out
    assert plan_command.main([*given, "--num_ranks", "4", "--mesh"]) == 2
    assert "--mesh needs --seq" in capsys.readouterr().err
