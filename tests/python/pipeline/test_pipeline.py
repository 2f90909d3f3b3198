# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A pipeline trains as the uncut model does: the same losses, norms and states, at every stage of ZeRO."""

import re

import pytest
import stages
import torch
from conftest import run_ranks

import deeptide
from deeptide.pipeline import PipelineModule
from deeptide.pipeline.engine import PipelineEngine
from deeptide.pipeline.errors import PipelineError

STEPS, GAS = 3, 4


def compare(cut, uncut, exact=True):
    """Losses on all ranks, norms within the order of a sum in fp64, and every state of the uncut model, once."""
    found = {}
    for losses, norms, states in cut:
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(uncut[0][0]), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )
        assert norms == pytest.approx(uncut[0][1], rel=1e-12 if exact else 1e-4)
        found |= states
    assert found.keys() == uncut[0][2].keys()
    for name, value in uncut[0][2].items():
        if exact:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def both(num_stages, data_size, settings, gas=GAS, **module):
    arguments = (settings, gas, STEPS, module)
    cut = run_ranks(num_stages * data_size, stages.train_cut, num_stages, *arguments)
    return cut, run_ranks(data_size, stages.train_uncut, *arguments)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gas", [1, GAS])
def test_a_pipeline_is_the_uncut_model_bit_for_bit(mesh, stage, schedule, dtype, gas):
    parallel = {"schedule": schedule}
    settings = stages.config(stage, gas, bf16=dtype == "bf16", gradient_clipping=0.0, parallel=parallel)
    compare(*both(*mesh, settings, gas))


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_takes_the_norm_of_all_stages(stage):
    cut, uncut = both(2, 2, stages.config(stage, GAS, gradient_clipping=0.01))
    assert min(uncut[0][1]) > 0.1
    compare(cut, uncut, exact=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_tied_weights_are_one_parameter_on_all_stages(mesh, stage, bf16):
    """Within the order of sums: the head's gradients are added over the micro-batches first."""
    cut, uncut = both(*mesh, stages.config(stage, GAS, bf16=bf16), tied=True)
    owners = [rank for rank, (_, _, states) in enumerate(cut) if "tied_modules.embedding.weight/master" in states]
    assert owners == list(range(mesh[1]))
    if not bf16:
        compare(cut, uncut, exact=False)
    for losses, norms, _ in cut:
        assert losses == pytest.approx(uncut[0][0], rel=2e-2 if bf16 else 1e-5)
        assert norms == pytest.approx(uncut[0][1], rel=5e-2 if bf16 else 1e-4)


def with_a_bad_gradient(world, settings, bad_stage):
    model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = stages.batches(engine.data_parallel_rank, engine.data_parallel_size, STEPS, GAS)
    engine.train_batch(given)
    before = stages.states_of(engine)
    name, parameter = list(model.named_parameters())[-1]
    is_bad = engine.stage_id == bad_stage and engine.data_parallel_rank == 1
    hook = parameter.register_hook(lambda gradient: gradient * float("nan")) if is_bad else None
    engine.train_batch(given)
    outcome = engine._outcome
    if hook is not None:
        hook.remove()
    after = stages.states_of(engine)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert engine.skipped_steps == 1
    engine.train_batch(given)
    assert engine.was_step_applied() and engine.global_steps == 3
    return outcome.parameter, outcome.rank, outcome.phase, name, engine.cur_scale


@pytest.mark.parametrize("bad_stage", [0, 1])
@pytest.mark.parametrize("fp16", [False, True])
def test_all_stages_skip_a_step_and_name_what_one_found(bad_stage, fp16):
    settings = stages.config(2, GAS, fp16={"enabled": fp16, "initial_scale_power": 8, "hysteresis": 1})
    results = run_ranks(4, with_a_bad_gradient, settings, bad_stage)
    name = results[2 * bad_stage][3]
    assert {result[:3] for result in results} == {(name, 2 * bad_stage + 1, "backward")}
    assert {result[4] for result in results} == {128.0 if fp16 else 1.0}


def evaluate(world, num_stages):
    module = {"tied": True}
    if num_stages == 0:
        engine = deeptide.initialize(model=stages.Uncut(**module), config=stages.config(3, GAS), world=world)[0]
        more = {"loss_fn": stages.loss_of}
    else:
        model = PipelineModule(stages.layers(**module), num_stages, loss_fn=stages.loss_of, world=world)
        engine = deeptide.initialize(model=model, config=stages.config(3, GAS), world=world)[0]
        more = {}
    data_size = world.size // max(num_stages, 1)
    given = lambda: stages.batches(world.rank % data_size, data_size, STEPS, GAS)  # noqa: E731
    mean = engine.eval_batch(given(), **more).item()
    losses, outputs = engine.eval_batch(given(), return_logits=True, reduce_output=None, num_micro_batches=7, **more)
    only = engine.eval_batch(given(), compute_loss=False, **({} if num_stages else more))
    engine.train_batch(given(), **more)
    return mean, [loss.item() for loss in losses], outputs, only, engine.eval_batch(given(), **more).item()


def test_an_evaluation_gives_the_losses_everywhere_and_the_outputs_on_the_last_stage():
    uncut = run_ranks(2, evaluate, 0)
    for rank, (mean, losses, outputs, only, after) in enumerate(run_ranks(4, evaluate, 2)):
        assert mean == uncut[0][0] and losses == uncut[rank % 2][1]
        assert after == pytest.approx(uncut[0][4], rel=1e-5) != mean
        if rank < 2:
            assert outputs is None and only is None
            continue
        assert len(outputs) == 7
        assert all(map(torch.equal, outputs, uncut[rank % 2][2]))
        assert len(only) == GAS


def run_out(world):
    model = PipelineModule(stages.layers(), num_stages=4, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(1, GAS), world=world)[0]
    reads = engine.is_first_stage() or engine.is_last_stage()
    given = list(stages.batches(0, 1, 2, GAS))
    batches = iter(given[: GAS + 1]) if reads else None
    engine.train_batch(batches)
    with pytest.raises(ValueError, match="ended after 1 of 4 micro-batches" if reads else "see its error"):
        engine.train_batch(batches)
    with pytest.raises(StopIteration):
        engine.train_batch(batches)
    with pytest.raises(ValueError, match="need an iterator" if reads else "see its error"):
        engine.train_batch()
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataloader([{"x": x, "y": y} for x, y in given[:GAS]] if reads else None)
    again = [engine.train_batch().item() for _ in range(2)]
    assert again[1] < again[0]
    for method in ("forward", "backward", "step", "__call__"):
        with pytest.raises(PipelineError, match=r"by train_batch\(\) and eval_batch\(\)"):
            getattr(engine, method)(None)


def test_all_stages_end_with_the_batches():
    run_ranks(4, run_out)


def on_own_data(world):
    data = [((torch.arange(5) * i) % 19, torch.full((5,), 3)) for i in range(16)]
    model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
    engine, _, loader, _ = deeptide.initialize(model=model, config=stages.config(1, 2), world=world, training_data=data)
    assert len(loader) == 4 and engine.train_batch_size() == 8
    assert engine.mesh == {"pipe": 2, "data": 2} and "pipe=2 data=2" in engine.summary()
    assert "hosts, of each stage: 1 host of 2 ranks, shared memory" in engine.summary()
    assert engine.data_parallel_rank == world.rank % 2
    return [engine.train_batch().item() for _ in range(3)]


def test_ranks_of_one_pipeline_load_equal_batches():
    losses = run_ranks(4, on_own_data)
    assert all(each == losses[0] for each in losses) and losses[0][2] < losses[0][0]


def meets_another_program(world):
    model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
    engine = deeptide.initialize(model=model, config=stages.config(0, GAS, deeptide={"error_grace": 0.2}), world=world)[
        0
    ]
    given = stages.batches(0, 1, STEPS, GAS)
    if world.rank == 0:
        engine._run._number = 5
    with pytest.raises((RuntimeError, deeptide.CommError)) as raised:
        engine.train_batch(given)
    return str(raised.value)


def test_stages_whose_programs_differ_are_named():
    texts = run_ranks(2, meets_another_program)
    assert any(
        "stage 1 expected activation of micro-batch 0 in step 1 from stage 0, and got activation of micro-batch 0 in "
        "step 6" in text
        for text in texts
    )


class Fails(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, given):
        raise ZeroDivisionError("the layer's own")


def meets_an_error(world):
    layers = [*stages.layers()[:-1], Fails()]
    model = PipelineModule(layers, num_stages=2, loss_fn=stages.loss_of, world=world)
    settings = stages.config(0, GAS, deeptide={"error_grace": 0.2})
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = stages.batches(0, 1, STEPS, GAS)
    with pytest.raises(ZeroDivisionError if world.rank == 1 else deeptide.CommError) as raised:
        engine.train_batch(given)
    return str(raised.value)


def test_a_stage_hears_of_another_ones_error():
    texts = run_ranks(2, meets_an_error)
    assert "rank 1 (pipeline 1, data 0) raised ZeroDivisionError in train_batch: the layer's own" in texts[0]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"parallel": {"pipeline": 4}}, "parallel.pipeline is 4, and the PipelineModule has 2 stages"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(more, text):
    def start(world):
        model = PipelineModule(stages.layers(), num_stages=2, loss_fn=stages.loss_of, world=world)
        with pytest.raises(deeptide.ConfigError, match=text):
            deeptide.initialize(model=model, config=stages.config(1, GAS, **more), world=world)

    run_ranks(2, start)


def test_a_plain_model_of_one_stage_is_no_pipeline():
    plain = deeptide.initialize(model=torch.nn.Linear(2, 2), config=stages.config(1, 1, parallel={"pipeline": 1}))[0]
    assert plain.mesh == {"pipe": 1, "data": 1} and plain.data_parallel_rank == 0
    assert not isinstance(plain, PipelineEngine)


def test_the_line_of_a_step_shows_the_loss_of_the_last_stage(capfd):
    settings = stages.config(0, GAS, steps_per_print=1)
    losses = run_ranks(2, stages.train_cut, 2, settings, GAS, STEPS, {})[0][0]
    lines = [line for line in capfd.readouterr().err.splitlines() if " | norm " in line]
    shown = [float(re.search(r"step \d+ \| loss ([\d.]+) \|", line)[1]) for line in lines]
    assert shown == pytest.approx(losses, rel=1e-3), lines
