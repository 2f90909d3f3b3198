# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline whose ranks share layers, beside data ranks: one mesh, and the numbers of the whole model."""

import importlib
import json

import cut
import families
import meshes
import models
import pytest
import stages
import torch
import torch.distributed as dist
from conftest import run_processes, run_ranks

import deeptide
from deeptide.as_deepspeed.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deeptide.pipeline import LayerSpec, PipelineModule
from deeptide.tensor import make_team
from deeptide.tensor.layers import as_column, as_row


def both(kind, mesh, stage, gas=meshes.GAS, **more):
    """`mesh`: (stages, data ranks, ranks that share layers)."""
    pipeline, data, tensor = mesh
    settings = meshes.config(kind, stage, pipeline, tensor, gas, **more)
    found = run_ranks(pipeline * data * tensor, meshes.train, kind, settings, gas)
    more.pop("parallel", None)
    return found, run_ranks(data, meshes.train, kind, meshes.config(kind, stage, gas=gas, **more), gas)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 2), (4, 1, 2), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("gas", [1, meshes.GAS])
def test_a_mesh_of_three_axes_trains_as_the_whole_model(mesh, stage, schedule, gas):
    kind = "llama-8" if mesh[2] == 4 else "llama"
    found, whole = both(kind, mesh, stage, gas, parallel={"schedule": schedule, "data": "auto"})
    meshes.compare(found, whole, kind)
    assert found[0][3] == {"pipe": mesh[0], "data": mesh[1], "tensor": mesh[2]}


@pytest.mark.costly
@pytest.mark.parametrize("kind", [kind for kind in meshes.KINDS if not kind.startswith("llama")])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_as_it_is_trains_on_a_mesh(kind, stage):
    meshes.compare(*both(kind, (2, 1, 2), stage), kind)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_takes_the_norm_of_all_stages_and_slices_once(stage):
    found, whole = both("qwen3", (2, 2, 2), stage, gradient_clipping=0.01)
    assert min(whole[0][1]) > 0.1
    meshes.compare(found, whole, "qwen3")


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_stages_change_no_bit_of_what_shared_layers_compute(stage, bf16):
    settings = [meshes.config("llama", stage, pipeline, 2, bf16=bf16) for pipeline in (2, 1)]
    mesh, one_stage = [run_ranks(4 * p, meshes.train, "llama", s) for p, s in zip((2, 1), settings, strict=True)]
    assert mesh[0][0] == one_stage[0][0]
    assert mesh[0][1] == pytest.approx(one_stage[0][1], rel=1e-12)
    models.assert_same(meshes.union(r[2] for r in mesh), meshes.union(r[2] for r in one_stage))


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(("stage", "of_parameters"), [(1, None), (3, "cpu"), (3, "nvme")])
@pytest.mark.parametrize("bf16", [False, True])
def test_slices_and_stages_whose_state_lies_elsewhere_change_no_bit(tmp_path, mesh, stage, of_parameters, bf16):
    pipeline, data, tensor = mesh
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    if of_parameters is not None:
        zero["offload_param"] = {"device": of_parameters, "nvme_path": str(tmp_path)}
    runs = [
        run_ranks(
            pipeline * data * tensor,
            meshes.train,
            "llama",
            meshes.config("llama", stage, pipeline, tensor, bf16=bf16, zero=more),
        )
        for more in ({}, zero)
    ]
    for (losses, norms, states, _), (others, theirs, found, _) in zip(*runs, strict=True):
        assert (losses, norms) == (others, theirs)
        models.assert_same(found, states)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bf16_begins_as_the_whole_model(kind):
    """Its rounding grows from step to step, with shared layers alone as much."""
    found, whole = both(kind, (2, 2, 2), 1, bf16=True)
    assert all(losses == found[0][0] for losses, *_ in found)
    cut.near(found[0][0], whole[0][0], 5e-3, "losses")
    cut.near(found[0][1][:1], whole[0][1][:1], 5e-3, "norms")


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_has_one_scale_on_the_mesh(stage):
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    found, whole = both("llama", (2, 2, 2), stage, fp16=fp16)
    cut.near(found[0][0], whole[0][0], 5e-3, "losses")
    cut.near(found[0][1], whole[0][1], 1e-2, "norms")


def not_finite(world, stage, bad):
    engine = meshes.start(world, "llama", meshes.config("llama", stage, 2, 2))
    meshes.steps(engine, "llama", 1)
    before = meshes.states(engine)
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "up_proj" in n)
    hook = parameter.register_hook(lambda gradient: gradient * float("nan")) if world.rank == bad else None
    meshes.steps(engine, "llama", 1, begin=1)
    if hook is not None:
        hook.remove()
    outcome = engine._outcome
    assert engine.skipped_steps == 1
    models.assert_same(meshes.states(engine), before)
    meshes.steps(engine, "llama", 1, begin=2)
    assert engine.was_step_applied()
    return name, outcome.parameter, outcome.rank


@pytest.mark.costly
@pytest.mark.parametrize("bad", [1, 6])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_skip_what_one_found(bad, stage):
    results = run_ranks(8, not_finite, stage, bad)
    assert {result[1:] for result in results} == {(results[bad][0], bad)}


# -- checkpoints and exports --------------------------------------------------------------------------------------

BEFORE, AFTER = 2, 2


def save(world, folder, kind, settings, blocking=True):
    engine = meshes.start(world, kind, settings)
    meshes.steps(engine, kind, BEFORE)
    states = meshes.states(engine)
    engine.save_checkpoint(folder, client_state={"note": 7}, blocking=blocking)
    after = meshes.steps(engine, kind, AFTER, begin=BEFORE)
    engine.wait_for_save()
    return states, after


def load(world, folder, kind, settings):
    engine = meshes.start(world, kind, settings, seed=9)
    path, client_state = engine.load_checkpoint(folder)
    assert path.endswith(f"global_step{BEFORE}")
    assert client_state == {"note": 7}
    return meshes.states(engine), meshes.steps(engine, kind, AFTER, begin=BEFORE)


MESHES = {"2x2": (4, 2, 2), "2x2x2": (8, 2, 2), "data": (4, 1, 1), "whole": (1, 1, 1), "tensor": (2, 1, 2)}


def settings_of(kind, mesh, stage, precision, place, folder):
    more = {"bf16": True} if precision == "bf16" else {}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if place and stage:
        more["zero"] = {"offload_optimizer": {"device": place, "nvme_path": str(folder / "nvme")}}
    return meshes.config(kind, stage, *MESHES[mesh][1:], **more)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("saved", "taken"),
    [("2x2", "data"), ("data", "2x2"), ("2x2", "whole"), ("whole", "2x2x2"), ("2x2", "tensor"), ("2x2x2", "2x2x2")],
)
@pytest.mark.parametrize("stages", [(0, 3), (3, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "types", [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")], ids="-".join
)
@pytest.mark.parametrize("places", [(None, None), ("cpu", "nvme"), ("nvme", None), (None, "cpu")], ids=str)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_checkpoint_loads_on_any_mesh(tmp_path, saved, taken, stages, kind, types, places, blocking):
    ranks, again = MESHES[saved][0], MESHES[taken][0]
    ours, theirs = (
        settings_of(kind, mesh, *how, tmp_path) for mesh, how in zip((saved, taken), zip(stages, types, places))
    )
    before = run_ranks(ranks, save, str(tmp_path), kind, ours, blocking)
    after = run_ranks(again, load, str(tmp_path), kind, theirs)
    models.assert_same(meshes.union(r[0] for r in after), meshes.union(r[0] for r in before))
    sizes, others = MESHES[saved][1:], MESHES[taken][1:]
    if ranks // (sizes[0] * sizes[1]) == again // (others[0] * others[1]):
        plain = types == ("fp32", "fp32")
        cut.near(after[0][1][0], before[0][1][0], 1e-5 if plain else 2e-2, "losses")
        cut.near(after[0][1][1], before[0][1][1], 1e-4 if plain else 5e-2, "norms")


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_bit_for_bit_on_the_same_mesh(tmp_path, stage):
    settings = meshes.config("llama", stage, 2, 2)
    before = run_ranks(8, save, str(tmp_path), "llama", settings)
    after = run_ranks(8, load, str(tmp_path), "llama", settings)
    assert [result[1] for result in after] == [result[1] for result in before]


# -- what is told, and what cannot be -----------------------------------------------------------------------------


def test_the_summary_names_the_mesh():
    def rank(world):
        engine = meshes.start(world, "llama", meshes.config("llama", 1, 2, 2))
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
        return engine.summary(), engine.train_batch_size(), shapes, engine.stage_id, engine.data_parallel_rank

    results = run_ranks(8, rank)
    for number, (summary, batch, shapes, stage, data_rank) in enumerate(results):
        assert "pipe=2 data=2 tensor=2" in summary
        assert batch == 2 * families.MICRO * meshes.GAS
        assert (stage, data_rank) == (number // 4, number // 2 % 2)
        assert shapes[f"model.layers.{2 * stage}.mlp.down_proj.weight"] == (16, 10)
        assert f"model.layers.{2 - 2 * stage}.mlp.down_proj.weight" not in shapes


@pytest.mark.parametrize(
    ("ranks", "parallel", "text"),
    [
        (4, {"pipeline": 2, "tensor": 4}, "ranks of each stage do not divide into teams of 4; take parallel.tensor 2"),
        (4, {"pipeline": 3, "tensor": 2}, "a pipeline of 3 stages over 4 ranks: .*take 2 or 4"),
        (4, {"pipeline": 2, "tensor": 2, "data": 3}, "pipeline=2 tensor=2 data=3 over 4 ranks is impossible"),
        (8, {"pipeline": 8, "tensor": 1}, "has no ModuleList or Sequential of 8 blocks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_cure(ranks, parallel, text):
    def rank(world):
        with pytest.raises(deeptide.ConfigError, match=text):
            meshes.start(world, "llama", meshes.config("llama", 0, parallel=parallel))

    run_ranks(ranks, rank)


def test_a_model_without_blocks_stays_whole():
    def rank(world):
        model = models.make_model(kind=lambda: torch.nn.Linear(4, 4))
        with pytest.raises(deeptide.ConfigError, match="has no ModuleList or Sequential"):
            deeptide.initialize(model=model, config=meshes.config("llama", 0, 2, 2), world=world)
        return tuple(model.weight.shape)

    assert set(run_ranks(4, rank)) == {(4, 4)}


# -- layers of one's own ------------------------------------------------------------------------------------------


class SharedBlock(stages.Block):
    def __init__(self, number, team):
        super().__init__(number)
        as_column(self.up, team)
        as_row(self.down, team)


def layers(team, shared):
    """`shared`: numbers of the blocks whose layers are."""
    middle = [LayerSpec(SharedBlock, i, team) if i in shared else LayerSpec(stages.Block, i) for i in range(6)]
    return [LayerSpec(stages.Embedding), *middle, LayerSpec(stages.Head)]


def train_layers(world, stage, shared, on_model, num_stages=2, topology=None):
    team = make_team(2, world, 60.0, num_stages)
    place = {"num_stages": 2} if topology is None else {"topology": topology}
    model = PipelineModule(layers(team, shared), **place, loss_fn=stages.loss_of, world=world)
    if on_model:
        model.tensor_team = team
    engine = deeptide.initialize(model=model, config=stages.config(stage, 3), world=world)[0]
    given = stages.batches(engine.data_parallel_rank, engine.data_parallel_size, 3, 3)
    return stages.train(engine, given, 3)[:2]


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("shared", [range(6), range(2)], ids=str)
def test_a_pipeline_module_has_shared_layers_of_its_own(stage, shared):
    found = run_ranks(8, train_layers, stage, shared, len(shared) < 6)
    whole = run_ranks(2, stages.train_uncut, stages.config(stage, 3), 3, 3, {})
    for losses, norms in found:
        cut.near(losses, whole[0][0], 1e-5, "losses")
        cut.near(norms, whole[0][1], 1e-4, "norms")


def test_a_topology_may_have_a_model_axis():
    given = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    expected = run_ranks(4, train_layers, 1, range(6), False)
    assert run_ranks(4, train_layers, 1, range(6), False, 2, given) == expected
    assert (
        "expected pipe, then data, then model"
        in run_ranks(4, refused_layers, 1, range(6), False, 2, ProcessTopology(axes=["model", "pipe"], dims=[2, 2]))[0]
    )
    assert (
        "its axis model has 4 ranks, and 2 share"
        in run_ranks(
            8, refused_layers, 1, range(6), False, 2, (PipeModelDataParallelTopology(num_pp=2, num_mp=4, num_dp=1))
        )[0]
    )


def refused_layers(world, *arguments):
    with pytest.raises(deeptide.ConfigError) as caught:
        train_layers(world, *arguments)
    return str(caught.value)


def test_stages_have_teams_alike():
    texts = run_ranks(4, refused_layers, 0, range(2), False)
    assert set(texts) == {
        "the stages' layers are shared by 2, 1 ranks, expected one number: give a stage without shared layers the team "
        "too, by model.tensor_team = team"
    }
    assert "was made for 1 stages, and the model has 2" in run_ranks(4, refused_layers, 0, range(6), False, 1)[0]


def test_whole_layers_of_a_pipeline_module_are_not_cut():
    def rank(world):
        model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
        with pytest.raises(deeptide.ConfigError, match=r"layers are whole: build them .*make_team\(2, stages=2\)"):
            deeptide.initialize(model=model, config=stages.config(0, 3, parallel={"tensor": 2}), world=world)

    run_ranks(4, rank)


# -- under DeepSpeed's names --------------------------------------------------------------------------------------


def grouped(pipeline):
    importlib.import_module("deeptide.as_deepspeed")
    deepspeed, groups = (importlib.import_module(name) for name in ("deepspeed", "deepspeed.utils.groups"))
    deepspeed.init_distributed("gloo")
    assert groups.get_tensor_model_parallel_world_size() == groups.get_model_parallel_world_size() == 1
    model = meshes.make("llama")
    settings = meshes.config("llama", 1, pipeline, 2)
    engine = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())[0]
    losses, _ = meshes.steps(engine, "llama", 2)

    def ranks_of(group):
        return dist.get_process_group_ranks(group)

    places = {
        "tensor": (
            groups.get_tensor_model_parallel_rank(),
            groups.get_tensor_model_parallel_world_size(),
            ranks_of(groups.get_tensor_model_parallel_group()),
            groups.get_tensor_model_parallel_src_rank(),
        ),
        "model": (
            groups.get_model_parallel_rank(),
            groups.get_model_parallel_world_size(),
            ranks_of(groups.get_model_parallel_group()),
        ),
        "data": (
            groups.get_data_parallel_rank(),
            groups.get_data_parallel_world_size(),
            ranks_of(groups.get_data_parallel_group()),
        ),
    }
    engine.destroy()
    assert groups.mpu is None
    print(json.dumps([losses, places]))


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", [1, 2])
def test_deepspeeds_groups_are_those_of_the_mesh(pipeline):
    done = run_processes(4, grouped, pipeline)
    results = [json.loads(process.stdout.splitlines()[-1]) for process in done]
    for rank, (losses, places) in enumerate(results):
        assert losses == results[0][0]
        first = rank - rank % 2
        assert places["tensor"] == [rank % 2, 2, [first, first + 1], first]
        if pipeline == 2:
            assert places["model"] == [rank, 4, [0, 1, 2, 3]]
            assert places["data"] == [0, 1, [rank]]
        else:
            assert places["model"] == [rank % 2, 2, [first, first + 1]]
            assert places["data"] == [rank // 2, 2, [rank % 2, rank % 2 + 2]]


def test_ranks_as_threads_leave_their_one_generator_alone(monkeypatch):
    """A rank that set it while another one built its model changed that one's weights, once in thousands of runs."""
    set_states = []
    monkeypatch.setattr(torch, "set_rng_state", set_states.append)
    run_ranks(2, meshes.train, "llama", meshes.config("llama", 1, tensor=2))
    assert not set_states
