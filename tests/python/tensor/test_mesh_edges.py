# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The edges of a run on meshes of stages and shared layers: rewinds, kept gradients, preemption, and who is named."""

import os
import re
import signal
import time

import cut
import meshes
import models
import pytest
import torch
from conftest import run_processes, run_ranks

import deeptide
from deeptide.tensor import team_of
from deeptide.tensor.cutting.slices import slices_of

CODE = 77


def policy(**deeptide_section):
    return {"deeptide": deeptide_section}


def poisoned_step(engine, victim):
    """A step in which one rank has a gradient that is not finite."""
    weights = [parameter for parameter in engine.module.parameters() if parameter.numel() and parameter.requires_grad]
    hook = None
    if engine.global_rank == victim:
        hook = weights[-1].register_hook(lambda gradient: gradient * float("nan"))
    meshes.steps(engine, "plain", 1)
    if hook is not None:
        hook.remove()
    assert engine.was_step_skipped()
    return engine._outcome


def rewinds(world, stage, pipeline, tensor, victim):
    section = policy(on_skipped="rewind", skipped_limit=2, rewind_interval=1)
    engine = meshes.start(world, "plain", meshes.config("plain", stage, pipeline, tensor, **section))
    meshes.steps(engine, "plain", 1)
    kept = meshes.states(engine)
    meshes.steps(engine, "plain", 1, begin=1)  # before it, the state has proved that it trains
    poisoned_step(engine, victim)
    outcome = poisoned_step(engine, victim)
    assert outcome.rewound_to == 1
    models.assert_same(meshes.states(engine), kept)
    losses = meshes.steps(engine, "plain", 2, begin=1)
    return losses, meshes.states(engine)


def straight(world, stage, pipeline, tensor):
    engine = meshes.start(world, "plain", meshes.config("plain", stage, pipeline, tensor))
    meshes.steps(engine, "plain", 1)
    return meshes.steps(engine, "plain", 2, begin=1), meshes.states(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_all_ranks_of_a_mesh_return_to_one_step(mesh, stage):
    pipeline, data, tensor = mesh
    ranks = pipeline * data * tensor
    expected = run_ranks(ranks, straight, stage, pipeline, tensor)
    for found, one in zip(run_ranks(ranks, rewinds, stage, pipeline, tensor, ranks - 1), expected, strict=True):
        assert found[0] == one[0]
        models.assert_same(found[1], one[1])


def with_kept_gradients(world, settings, change):
    engine = cut.start(world, settings)
    rank, ranks = cut.batch_rank(engine)
    tokens, targets = models.batches(1, cut.MICRO * ranks)[0]
    mine = slice(rank * cut.MICRO, (rank + 1) * cut.MICRO)
    engine.backward(engine(tokens[mine], targets[mine]))
    team, cuts = team_of(engine.module), dict(slices_of(engine.module))
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        gradient = parameter.grad
        is_cut = name in cuts
        gradients[name] = cuts[name].join(team.core.all_gather(gradient, "checkpoint")) if is_cut else gradient.clone()
        parameter.grad.mul_(change)
    engine.step()
    return gradients, engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("change", [1.0, 0.5])
def test_kept_gradients_are_slices_and_may_be_changed(stage, change):
    more = {"gradient_clipping": 0.0, **policy(keep_grad=True)}
    whole = run_ranks(2, with_kept_gradients, cut.config(stage, 1, **more), change)[0]
    for gradients, norm in run_ranks(4, with_kept_gradients, cut.config(stage, 2, **more), change):
        for name, value in whole[0].items():
            cut.near(gradients[name], value, 1e-4, name)
        cut.near([norm], [whole[1]], 1e-4, "norm")


def change_one(world, settings):
    engine = cut.start(world, settings)
    tokens, targets = models.batches(1, cut.MICRO)[0]
    engine.backward(engine(tokens, targets))
    if world.rank == 3:
        engine.module.h[0].up.weight.grad.mul_(2)
    with pytest.raises(ValueError, match=r"'h.0.up.weight' was left alone on rank 1 and changed on rank 3"):
        engine.step()


def test_a_slice_that_one_data_rank_changed_is_named():
    run_ranks(4, change_one, cut.config(1, 2, **policy(keep_grad=True)))


def preempted(folder, pipeline, tensor, victim):
    checkpoint = {"on_preempt": {"folder": folder, "exit_code": CODE}}
    settings = meshes.config("plain", 1, int(pipeline), int(tensor), checkpoint=checkpoint)
    engine = meshes.start(None, "plain", settings)
    meshes.steps(engine, "plain", 1)
    if engine.global_rank == int(victim):
        os.kill(os.getpid(), signal.SIGUSR1)
    meshes.steps(engine, "plain", 3, begin=1)
    raise AssertionError("the signal was lost")


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_signal_to_any_rank_of_a_mesh_saves_all(tmp_path, mesh, victim):
    preload = ("deeptide.tensor.axis", "deeptide.pipeline.engine")
    ranks = run_processes(4, preempted, str(tmp_path), *mesh, victim, check=False, preload=preload)
    assert [rank.returncode for rank in ranks] == [CODE] * 4, "".join(rank.stderr[-800:] for rank in ranks)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert f"rank {victim} (" in ranks[victim].stderr
    assert ") got signal" in ranks[victim].stderr


def evaluates(folder):
    checkpoint = {"on_preempt": {"folder": folder, "exit_code": CODE, "deadline": 2.0}}
    settings = cut.config(1, 2, checkpoint=checkpoint)
    engine = deeptide.initialize(model=models.make_model(), config=settings)[0]
    cut.steps(engine, 1)
    engine.eval()
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    tokens, targets = models.batches(1, cut.MICRO)[0]
    end = time.monotonic() + 60
    with torch.no_grad():
        while time.monotonic() < end:
            engine(tokens, targets)
    raise AssertionError("the signal was lost")


@pytest.mark.costly
def test_ranks_that_share_layers_leave_an_evaluation_together(tmp_path):
    ranks = run_processes(2, evaluates, str(tmp_path), check=False, preload=("deeptide.tensor.axis",))
    assert [rank.returncode for rank in ranks] == [CODE] * 2, "".join(rank.stderr[-800:] for rank in ranks)
    assert (tmp_path / "latest").read_text() == "global_step1"


def blames(world, pipeline, tensor):
    section = policy(on_skipped="raise", skipped_limit=2)
    engine = meshes.start(world, "plain", meshes.config("plain", 1, pipeline, tensor, **section))
    text = repr(poisoned_step(engine, 3))
    with pytest.raises(deeptide.NonFiniteError) as raised:
        poisoned_step(engine, 3)
    return text, str(raised.value)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [((2, 2), "rank 3 (pipeline 1, data 0, tensor 1)"), ((2, 1), "rank 3 (pipeline 1, data 1)"),
     ((1, 2), "rank 3 (data 1, tensor 1)"), ((1, 1), "rank 3")],
)  # fmt: skip
def test_ranks_are_named_by_their_coordinates(mesh, name):
    for outcome, error in run_ranks(4, blames, *mesh):
        assert f" on {name}, in backward" in outcome
        assert f" of {name}, in backward" in error


def differing_models(world, settings):
    """The ranks' errors where one has another learning rate; other stages hear that it failed."""
    rate = 0.02 if world.rank == 3 else 0.01
    with pytest.raises((deeptide.ConfigError, deeptide.CommError)) as raised:
        meshes.start(world, "plain", {**settings, "optimizer": {"type": "Adam", "params": {"lr": rate}}})
    return str(raised.value)


def differing_rates(world, settings):
    engine = meshes.start(world, "plain", settings)
    engine.optimizer.param_groups[0]["lr"] = 0.02 if world.rank == 3 else 0.01
    engine.train_batch(iter(meshes.batches("plain", engine, 1)))


def write_alone(world, engine):
    """The last rank changes a parameter, and all train."""
    if world.rank == 3:
        with torch.no_grad():
            next(p for p in engine.module.parameters() if p.requires_grad and p.numel()).add_(0.5)
    engine.train_batch(iter(meshes.batches("plain", engine, 1)))


def start_guarded(world, settings, on_drift):
    guard = {**settings["deeptide"], "drift_interval": 1, "on_drift": on_drift}
    return meshes.start(world, "plain", {**settings, "deeptide": guard})


def stopped_copies(world, settings):
    """All stages end the step with the error of one."""
    engine = start_guarded(world, settings, "stop")
    with pytest.raises(deeptide.DriftError, match=re.escape(f", on {' and '.join(STAGED[1])}. A rank")) as raised:
        write_alone(world, engine)
    return str(raised.value)


def mended_copies(world, settings):
    """The first rank of a stage tells of it, though rank 0 is of another stage."""
    write_alone(world, start_guarded(world, settings, "sync"))


SHARED = (1, 2), ("rank 0 (data 0, tensor 0)", "rank 3 (data 1, tensor 1)")
STAGED = (2, 1), ("rank 2 (pipeline 1, data 0)", "rank 3 (pipeline 1, data 1)")


@pytest.mark.parametrize(
    ("program", "mesh", "names"),
    [
        (differing_models, *SHARED),
        (differing_models, *STAGED),
        (differing_rates, *SHARED),
        (differing_rates, *STAGED),
        pytest.param(mended_copies, *STAGED, marks=pytest.mark.apart),
        pytest.param(stopped_copies, *STAGED, marks=pytest.mark.apart),  # refused where ranks share layers
    ],
)
def test_ranks_that_differ_are_named_by_their_coordinates(program, mesh, names, capfd):
    texts = run_ranks(4, program, meshes.config("plain", 0, *mesh))
    told = capfd.readouterr().err + "".join(text for text in texts if text)
    assert all(name in told for name in names), told
