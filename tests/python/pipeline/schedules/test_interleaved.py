# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A PipelineModule with several chunks on each stage runs the interleaved schedule and trains as the uncut model."""

import threading
import time

import pytest
import stages
import torch
from conftest import run_ranks
from test_pipeline import STEPS, compare

import deeptide
from deeptide import pipeline
from deeptide.pipeline import PipelineModule
from deeptide.pipeline.step import stage_run
from deeptide.pipeline.step.bubble import measured_bubble

GAS = 5  # no multiple of the stages


def start(world, num_stages, chunks, settings, **module):
    model = PipelineModule(
        stages.layers(**module), num_stages=num_stages, loss_fn=stages.loss_of, chunks=chunks, world=world
    )
    return deeptide.initialize(model=model, config=settings, world=world)[0]


def train_chunks(world, num_stages, chunks, settings, gas, module):
    engine = start(world, num_stages, chunks, settings, **module)
    given = stages.batches(engine.data_parallel_rank, engine.data_parallel_size, STEPS, gas)
    found = stages.train(engine, given, STEPS)
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * gas)
    return found


def both(num_stages, chunks, data_size, settings, gas=GAS, **module):
    cut = run_ranks(num_stages * data_size, train_chunks, num_stages, chunks, settings, gas, module)
    return cut, run_ranks(data_size, stages.train_uncut, settings, gas, STEPS, module)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 2, 1), (2, 4, 1), (3, 2, 1), (4, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("gas", [1, 4, GAS])
@pytest.mark.costly
def test_chunks_train_as_the_uncut_model_bit_for_bit(mesh, stage, bf16, gas):
    settings = stages.config(stage, gas, bf16=bf16, gradient_clipping=0.0)
    compare(*both(*mesh, settings, gas))


def without_gradients(world, num_stages, chunks, frozen, settings, folder):
    """Chunks whose layers have no trained parameter of their own."""
    model = stages.Uncut()
    if num_stages:
        model = PipelineModule(stages.layers(), num_stages, loss_fn=stages.loss_of, chunks=chunks, world=world)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.split(".")[0]) not in frozen)
    engine = deeptide.initialize(model=model, config=settings, world=world)[0]
    given = stages.batches(0, 1, STEPS, GAS)
    found = stages.train(engine, given, STEPS, *(() if num_stages else (stages.loss_of,)))
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * GAS)
    engine.save_checkpoint(f"{folder}/{num_stages}")
    return found


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_a_chunk_may_have_nothing_to_train(part, stage, tmp_path):
    parts = run_ranks(2, lambda world: start(world, 2, 2, stages.config(0, GAS)).module.parts)[0]
    frozen = range(*parts[part : part + 2])
    settings = stages.config(stage, GAS, gradient_clipping=0.0)
    cut = run_ranks(2, without_gradients, 2, 2, frozen, settings, str(tmp_path))
    compare(cut, run_ranks(1, without_gradients, 0, 1, frozen, settings, str(tmp_path)))


@pytest.mark.parametrize("mesh", [(2, 2, 1), (3, 2, 1)], ids=str)
def test_tied_weights_belong_to_the_first_stage(mesh):
    cut, uncut = both(*mesh, stages.config(1, GAS), tied=True)
    assert [rank for rank, (_, _, states) in enumerate(cut) if any("tied" in name for name in states)] == [0]
    compare(cut, uncut, exact=False)


def trace(world, schedule, num_stages, chunks, micro_batches):
    """Lists what a stage does in a step, and the most micro-batches whose activations it holds."""
    engine = start(world, num_stages, chunks, stages.config(0, micro_batches, parallel={"schedule": schedule}))
    done, alive, peak = [], 0, 0
    run = engine._run
    for name in ("receive_activation", "forward", "send_activation", "receive_gradient", "backward", "send_gradient"):
        method = getattr(run, f"_{name}")

        def traced(piece, name=name, method=method):
            nonlocal alive, peak
            method(piece)
            done.append((name, *piece))
            alive += {"forward": 1, "backward": -1}.get(name, 0)
            peak = max(peak, alive)

        setattr(run, f"_{name}", traced)
    engine.train_batch(stages.batches(0, 1, 1, micro_batches))
    return done, peak


NAMES = {"1f1b": "one_f_one_b"}  # of the configuration, where the binding has another


@pytest.mark.parametrize(
    ("schedule", "num_stages", "chunks", "micro_batches"),
    [
        ("interleaved", 2, 2, 5),
        ("interleaved", 3, 2, 6),
        ("interleaved", 4, 2, 2),
        ("1f1b", 2, 1, 3),
        ("1f1b", 4, 1, 6),
        ("gpipe", 2, 1, 3),
        ("gpipe", 4, 1, 6),
    ],
)
def test_a_stage_does_what_the_simulator_runs(schedule, num_stages, chunks, micro_batches):
    kind = getattr(pipeline.PipelineSchedule, NAMES.get(schedule, schedule))
    lists = pipeline.instructions(kind, num_stages, micro_batches, chunks)
    on_paper = pipeline.simulate(lists, num_stages, micro_batches, chunks)
    for rank, (done, peak) in enumerate(run_ranks(num_stages, trace, schedule, num_stages, chunks, micro_batches)):
        assert done == [(each.action.name, each.chunk, each.micro_batch) for each in lists[rank]]
        assert peak == on_paper.peak_activations[rank]


def evaluate(world, num_stages, chunks):
    engine = start(world, num_stages, chunks, stages.config(3, GAS)) if num_stages else None
    more = {} if num_stages else {"loss_fn": stages.loss_of}
    if engine is None:
        engine = deeptide.initialize(model=stages.Uncut(), config=stages.config(3, GAS), world=world)[0]
    given = lambda: stages.batches(0, 1, 2, GAS)  # noqa: E731
    losses, outputs = engine.eval_batch(given(), return_logits=True, reduce_output=None, num_micro_batches=7, **more)
    engine.train_batch(given(), **more)
    return [loss.item() for loss in losses], outputs, engine.eval_batch(given(), **more).item()


def test_an_evaluation_passes_all_chunks():
    whole = run_ranks(1, evaluate, 0, 1)[0]
    results = run_ranks(2, evaluate, 2, 3)
    for losses, _, after in results:
        assert losses == whole[0] and after == pytest.approx(whole[2], rel=1e-5)
    assert results[0][1] is None and all(map(torch.equal, results[1][1], whole[1]))


def save(world, folder):
    engine = start(world, 2, 2, stages.config(2, 2))
    given = stages.batches(0, 1, 4, 2)
    engine.train_batch(given)
    engine.save_checkpoint(folder)
    return [engine.train_batch(given).item() for _ in range(2)]


def load(world, folder, num_stages, chunks):
    engine = start(world, num_stages, chunks, stages.config(1, 2))
    assert engine.load_checkpoint(folder)[0] is not None
    given = stages.batches(0, 1, 4, 2)
    for _ in range(2):
        next(given)
    return [engine.train_batch(given).item() for _ in range(2)]


@pytest.mark.parametrize(("num_stages", "chunks"), [(2, 1), (2, 4), (4, 2), (1, 1)])
def test_a_checkpoint_loads_with_other_chunks(num_stages, chunks, tmp_path):
    saved = run_ranks(2, save, str(tmp_path))[0]
    for losses in run_ranks(num_stages, load, str(tmp_path), num_stages, chunks):
        assert losses == pytest.approx(saved, rel=1e-5)


def recomputed(world, interval):
    model = PipelineModule(
        stages.layers(), 2, loss_fn=stages.loss_of, activation_checkpoint_interval=interval, chunks=2, world=world
    )
    engine = deeptide.initialize(model=model, config=stages.config(3, GAS), world=world)[0]
    return stages.train(engine, stages.batches(0, 1, STEPS, GAS), STEPS)


def test_recomputed_chunks_change_no_number():
    for (losses, norms, states), again in zip(run_ranks(2, recomputed, 0), run_ranks(2, recomputed, 3), strict=True):
        assert (losses, norms) == again[:2] and all(torch.equal(value, again[2][key]) for key, value in states.items())


def refuse(world):
    with pytest.raises(ValueError, match="chunks: got 0, expected 1 or more"):
        start(world, 2, 0, stages.config(0, 1))
    with pytest.raises(deeptide.ConfigError, match='schedule is "gpipe", and the PipelineModule has 2 chunks'):
        start(world, 2, 2, stages.config(0, 1, parallel={"schedule": "gpipe"}))
    with pytest.raises(deeptide.ConfigError, match="has none of the 8 layers"):
        start(world, 2, 5, stages.config(0, 1))


def test_what_chunks_cannot_is_refused():
    run_ranks(2, refuse)


def meets_another_program(world):
    engine = start(world, 2, 2, stages.config(0, GAS, deeptide={"error_grace": 0.2}))
    if world.rank == 0:
        engine._run._number = 5
    with pytest.raises((RuntimeError, deeptide.CommError)) as raised:
        engine.train_batch(stages.batches(0, 1, 1, GAS))
    return str(raised.value)


def test_stages_whose_programs_differ_are_named():
    texts = run_ranks(2, meets_another_program)
    wanted = "stage 1 expected activation for chunk 0 of micro-batch 0 in step 1 from stage 0, and got activation for "
    assert any(wanted + "chunk 0 of micro-batch 0 in step 6: the stages' programs differ" in text for text in texts)


def few(world, micro_batches, chunks):
    engine = start(world, 2, chunks, stages.config(0, micro_batches))
    return [text for text in engine._said if "the pipeline has 2 stages" in text]


def test_a_step_too_small_for_its_schedule_is_named():
    text = "gradient_accumulation_steps is 1, and the pipeline has 2 stages, which are idle for 50 % of such a step: "
    assert run_ranks(2, few, 1, 1) == [[text + "give 2 or more"]] * 2
    assert run_ranks(2, few, 2, 1) == [[], []]


# -- the bubble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2)])
def test_the_measure_is_the_formulas_on_the_simulators_times(kind, chunks):
    schedule = getattr(pipeline.PipelineSchedule, kind)
    step = pipeline.simulate(schedule, 4, 8, chunks)
    assert measured_bubble([(step.time, idle) for idle in step.idle]) == pytest.approx(step.bubble)
    assert measured_bubble([(step.time - 1, step.idle[0] - 1), *((step.time, idle) for idle in step.idle[1:])]) == (
        pytest.approx(step.bubble)  # a stage that ends before the others is idle then
    )
    assert measured_bubble([]) == measured_bubble([(0.0, 0.0)]) == 0.0


def slow_stage(world):
    engine = start(world, 2, 1, stages.config(0, GAS, wall_clock_breakdown=True))
    assert engine.bubble() is None
    given = stages.batches(0, 1, 2, GAS)
    if world.rank == 0:
        getattr(engine.module, "1").register_forward_pre_hook(lambda module, args: time.sleep(0.2))
    engine.train_batch(given)
    return engine.bubble()


def test_the_bubble_is_measured_and_told_beside_the_formula(caplog):
    bubbles = run_ranks(2, slow_stage)
    assert bubbles[0] == bubbles[1] and bubbles[0].formula == pytest.approx(1 / (GAS + 1))
    assert 0.25 < bubbles[0].measured < 1  # the second stage waits for most of the first one's forwards
    assert [r.message for r in caplog.records if r.message.startswith("pipeline | ")] == [f"pipeline | {bubbles[0]}"]


class Clock(threading.local):
    """Each rank's own, which moves where a test says so."""

    now = 0.0

    def perf_counter(self):
        return self.now


def work_and_step(world, clock):
    """A forward takes a second, the optimizer's step, which waits for other stages, 100."""
    engine = start(world, 2, 1, stages.config(0, GAS))
    close, closed = engine.close_piece, []

    def forward(*_):
        clock.now += 1

    def close_late():
        closed.append(close())
        clock.now += 100 * (len(closed) == GAS)
        return closed[-1]

    engine.module.register_forward_pre_hook(forward)
    engine.close_piece = close_late
    engine.train_batch(stages.batches(0, 1, 1, GAS))
    assert len(closed) == GAS and clock.now == GAS + 100
    return engine._run.times


def test_the_optimizers_step_is_no_part_of_the_bubble(monkeypatch):
    """A stage that is done waits there for the others: it would seem to work."""
    clock = Clock()
    monkeypatch.setattr(stage_run, "time", clock)
    assert run_ranks(2, work_and_step, clock) == [(GAS, 0), (GAS, 0)]
