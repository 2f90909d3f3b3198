# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The timeline: spans of a step add up to it, all ranks stand on one clock, and torch.profiler sees the same names."""

import itertools
import json
import time

import pytest
import torch
from conftest import run_processes, run_ranks
from models import batches, make_model

import deeptide
from deeptide._commands.trace import join, main

PHASES = ("between", "forward", "backward", "step")


def config_of(folder, **extra):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "deeptide": {
            "shared_memory": False,
            "timeline": {"enabled": True, "output_path": str(folder), "start_step": 2, "num_steps": 2},
        },
        **extra,
    }


def train(world, folder, steps=4):
    engine = deeptide.initialize(model=make_model(), config=config_of(folder), world=world)[0]
    for tokens, targets in batches(steps, 4):
        engine.backward(engine(tokens, targets))
        engine.step()
    return engine


def rank_of_two(folder):
    train(None, folder)


def spans(events, rank, category):
    return [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["cat"] == category]


@pytest.fixture
def trace(tmp_path):
    run_processes(2, rank_of_two, str(tmp_path))
    return json.loads(join(tmp_path).read_text())["traceEvents"]


def test_phases_follow_each_other_and_add_up_to_the_steps(trace):
    for rank in (0, 1):
        phases = sorted(spans(trace, rank, "phase"), key=lambda e: e["ts"])
        assert {e["name"] for e in phases} >= set(PHASES)
        total = phases[-1]["ts"] + phases[-1]["dur"] - phases[0]["ts"]
        assert sum(e["dur"] for e in phases) == pytest.approx(total, rel=0.02)
        for one, other in itertools.pairwise(phases):
            assert other["ts"] == pytest.approx(one["ts"] + one["dur"], abs=1.0)


def rank_that_times_itself(folder):
    engine = deeptide.initialize(model=make_model(), config=config_of(folder))[0]
    ends = []
    for step, (tokens, targets) in enumerate(batches(4, 4)):
        time.sleep(0.2 + 0.1 * step)  # the ranks wait for each other, and steps differ
        engine.backward(engine(tokens, targets))
        before = time.perf_counter()
        engine.step()
        ends.append((before, time.perf_counter()))
    print(json.dumps(ends))


def test_spans_add_up_to_the_steps_that_the_program_times(tmp_path):
    """Against a clock of the program's own, on every rank. A step ends while the program is in `step()`."""
    done = run_processes(2, rank_that_times_itself, str(tmp_path))
    events = json.loads(join(tmp_path).read_text())["traceEvents"]
    for rank, process in enumerate(done):
        ends = json.loads(process.stdout.splitlines()[-1])[:3]  # of the steps that are recorded
        phases = sorted(spans(events, rank, "phase"), key=lambda e: e["ts"])
        last = [i for i, e in enumerate(phases) if e["name"] == "step"]
        parts = [phases[: last[0] + 1], phases[last[0] + 1 : last[1] + 1]]
        for earlier, later, step in zip(ends, ends[1:], parts, strict=False):
            shortest, longest = later[0] - earlier[1], later[1] - earlier[0]
            assert shortest - 1e-3 <= sum(e["dur"] for e in step) * 1e-6 <= longest + 1e-3


def test_what_happens_within_a_step_is_there(trace):
    for rank in (0, 1):
        assert {e["name"] for e in spans(trace, rank, "unit")} >= {"h.0", "h.1", "h.2"}
        assert [e["name"] for e in spans(trace, rank, "optimizer")] == ["optimizer step"] * 2
        waits = {e["name"] for e in spans(trace, rank, "wait")}
        assert any("gathering" in name or "agreeing on" in name for name in waits), waits
        begun = [e for e in trace if e["pid"] == rank and e["ph"] == "b"]
        ended = {e["id"]: e for e in trace if e["pid"] == rank and e["ph"] == "e"}
        assert {e["name"] for e in begun} >= {"all-gather"}
        assert all(ended[e["id"]]["ts"] >= e["ts"] for e in begun)
        assert all(e["args"]["bytes"] > 0 and e["args"]["channel"] for e in begun)


def test_spans_lie_within_the_step_that_they_tell(trace):
    for rank in (0, 1):
        for optimizer in spans(trace, rank, "optimizer"):
            (step,) = [
                e
                for e in spans(trace, rank, "phase")
                if e["name"] == "step" and e["ts"] <= optimizer["ts"] <= e["ts"] + e["dur"]
            ]
            assert optimizer["ts"] + optimizer["dur"] <= step["ts"] + step["dur"]


def test_ranks_stand_on_one_clock(trace):
    """No rank passes a step's exchange before all have begun that step."""
    begins, ends = {}, {}
    for rank in (0, 1):
        for e in spans(trace, rank, "phase"):
            if e["name"] == "step":
                begins.setdefault(e["args"]["step"], []).append(e["ts"])
                ends.setdefault(e["args"]["step"], []).append(e["ts"] + e["dur"])
    both = [step for step in begins if len(begins[step]) == 2]
    assert both
    for step in both:
        assert max(begins[step]) < min(ends[step])


def write(folder, rank, clock, shift, world=2):
    events = [{"ph": "X", "name": "step", "cat": "phase", "pid": rank, "tid": 1, "ts": 100.0 + shift, "dur": 5.0}]
    exchanges = [[step, (1000 * step + 3 * rank) * 1000 + shift * 1000] for step in range(3)]
    facts = {"rank": rank, "world": world, "clock": clock, "exchanges": exchanges}
    (folder / f"trace.rank{rank}.json").write_text(json.dumps({"traceEvents": events, "deeptide": facts}))


def test_another_hosts_clock_is_moved_by_the_exchanges(tmp_path):
    write(tmp_path, 0, "a", 0)
    write(tmp_path, 1, "b", 5_000_000)
    events = json.loads(join(tmp_path).read_text())["traceEvents"]
    times = {e["pid"]: e["ts"] for e in events}
    assert times[1] - times[0] == pytest.approx(-3)  # what that rank is late for the exchanges


def test_a_step_that_one_rank_missed_is_left_out(tmp_path):
    for rank, steps in enumerate([(4, 5), (5, 6)]):
        write(tmp_path, rank, "a", 0)
        path = tmp_path / f"trace.rank{rank}.json"
        trace = json.loads(path.read_text())
        (event,) = trace["traceEvents"]
        trace["traceEvents"] = [event | {"args": {"step": step}} for step in steps]
        path.write_text(json.dumps(trace))
    events = json.loads(join(tmp_path).read_text())["traceEvents"]
    assert [e["args"]["step"] for e in events] == [5, 5]


def test_the_command_says_what_lacks(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no trace.rank*.json" in capsys.readouterr().err
    write(tmp_path, 0, "a", 0, world=3)
    assert main([str(tmp_path)]) == 2
    assert "lacks the timelines of ranks [1, 2] of 3" in capsys.readouterr().err


def test_only_the_steps_asked_for_are_recorded(tmp_path):
    run_ranks(2, train, str(tmp_path))
    trace = json.loads((tmp_path / "trace.rank0.json").read_text())
    steps = {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "step"}
    assert steps == {1, 2}  # that had ended before


def test_torch_profiler_sees_the_same_names(tmp_path):
    engine = deeptide.initialize(model=make_model(), config=config_of(tmp_path) | {"deeptide": {}})[0]
    data = batches(3, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for tokens, targets in data:
            engine.backward(engine(tokens, targets))
            engine.step()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("deeptide::")}
    for name in ("forward", "backward", "step", "optimizer step"):
        assert counts[f"deeptide::{name}"] == 3, counts
    inside = [e for e in profile.events() if e.name == "aten::embedding"]
    outside = [e for e in profile.events() if e.name == "deeptide::forward"]
    assert all(any(o.time_range.start <= e.time_range.start <= o.time_range.end for o in outside) for e in inside)
    engine.backward(engine(*data[0]))  # goes on without a profiler
    engine.step()
