# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Topologies, grids and schedules of deepspeed.runtime.pipe are those of DeepSpeed 0.19.8; its 1F1B is the core's."""

import hashlib
import importlib
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import run_processes
from test_as_deepspeed_engine import interface

from deeptide import pipeline

THEIRS = json.loads((Path(__file__).parent / "pipe_0_19_8.json").read_text())


def module(name):
    interface()
    return importlib.import_module(f"deepspeed.runtime.pipe.{name}")


def topology_of(facts):
    return getattr(module("topology"), facts["kind"])(*facts["args"]) if facts["kind"] else None


@pytest.mark.parametrize("facts", THEIRS["topologies"], ids=lambda facts: f"{facts['kind']}-{facts['world']}")
def test_a_topology_is_theirs(facts):
    topology = topology_of(facts)
    ranks = range(topology.world_size())
    axes = list(topology.get_axis_names())
    assert (axes, len(ranks), str(topology)) == (facts["axes"], facts["world"], facts["text"])
    assert [list(topology.get_coord(rank)) for rank in ranks] == facts["coords"]
    assert [topology.get_rank(**topology.get_coord(rank)._asdict()) for rank in ranks] == list(ranks)
    assert [topology.get_rank_repr(rank) for rank in ranks] == facts["reprs"]
    assert [topology.get_rank_repr(rank, [axes[0]], ".", "/") for rank in ranks] == facts["long"]
    assert {axis: topology.get_axis_comm_lists(axis) for axis in [*axes, "none"]} == facts["lists"]
    assert {axis: topology.get_dim(axis) for axis in [*axes, "none"]} == facts["dims"]
    assert {a: [topology.get_axis_list(a, i) for i in range(topology.get_dim(a))] for a in axes} == facts["at"]
    for first, second, i, j, matching in facts["match"]:
        assert topology.filter_match(**{first: i, second: j}) == matching


def test_a_topology_says_what_it_lacks():
    theirs = module("topology")
    topology = theirs.PipeDataParallelTopology(num_pp=2, num_dp=3)
    for call, text in (
        (lambda: topology.get_rank(pipe=0), r"got coordinates of \['pipe'\], expected one for each of"),
        (lambda: topology.get_rank(pipe=0, data=3), r"ProcessCoord\(pipe=0, data=3\) is not on the grid"),
        (lambda: topology.get_coord(6), "rank 6 is not in the topology: expected 0 to 5"),
        (lambda: topology.filter_match(row=1), "got axis 'row', expected one of"),
        (lambda: theirs.ProcessTopology(["a"], [0]), "expected a size >= 1 for each"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def check_grids():
    theirs = module("topology")
    importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
    for facts in THEIRS["grids"]:
        grid = theirs.PipelineParallelGrid(topology_of(facts))
        mine = facts["ranks"][dist.get_rank()]
        assert {name: getattr(grid, name)() for name in mine["methods"]} == mine["methods"]
        assert {name: getattr(grid, name) for name in mine["attributes"]} == mine["attributes"]
        assert [grid.stage_to_global(stage) for stage in range(grid.pipe_parallel_size)] == mine["stages"]
        for name, ranks in mine["groups"].items():
            assert dist.get_process_group_ranks(getattr(grid, name)()) == ranks, name
    with pytest.raises(ValueError, match=r"the grid \{'pipe': 3, 'data': 1\} has 3 ranks, but the world has 4"):
        theirs.PipelineParallelGrid(theirs.PipeDataParallelTopology(3, 1))


def test_a_grid_is_theirs_on_every_rank():
    run_processes(4, check_grids)


def as_text(kind, micro_batches, stages, stage):
    schedule = getattr(module("schedule"), kind)(micro_batches, stages, stage)
    return f"{schedule.num_pipe_buffers()} " + " | ".join(" ".join(map(repr, step)) for step in schedule)


def test_schedules_are_theirs():
    for name, text in THEIRS["schedules"].items():
        kind, *numbers = name.split()
        assert as_text(kind, *map(int, numbers)) == text
    for name, digest in THEIRS["digests"].items():
        kind, stages = name.split()[0], int(name.split()[1])
        texts = (as_text(kind, count, stages, stage) for count in range(1, 18) for stage in range(stages))
        assert hashlib.sha256("".join(texts).encode()).hexdigest() == digest, name


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_their_training_schedule_is_the_core_s_1f1b(stages):
    names = {"ForwardPass": "forward", "BackwardPass": "backward"}
    for count in (1, 2, 5, 16):
        lists = pipeline.instructions(pipeline.PipelineSchedule.one_f_one_b, stages, count)
        for stage, ours in enumerate(lists):
            theirs = [
                names[instruction.name]
                for step in module("schedule").TrainSchedule(count, stages, stage)
                for instruction in step
                if instruction.name in names
            ]
            assert theirs == [step.action.name for step in ours if step.action.name in names.values()]


def test_lists_of_instructions_run_on_paper():
    kind, costs = pipeline.PipelineSchedule, pipeline.StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)
    steps = {name: pipeline.simulate(getattr(kind, name), 4, 8) for name in ("gpipe", "one_f_one_b", "zero_bubble")}
    assert {name: step.time for name, step in steps.items()} == {"gpipe": 33, "one_f_one_b": 33, "zero_bubble": 27}
    for name, step in steps.items():
        assert step.idle == [pipeline.published_idle_time(getattr(kind, name), 4, 8, costs)] * 4
        peaks = [pipeline.published_peak_activations(getattr(kind, name), 4, 8, stage) for stage in range(4)]
        assert step.peak_activations == peaks
    assert steps["one_f_one_b"].bubble == pytest.approx(9 / 33)
    assert pipeline.simulate(kind.interleaved, 4, 8, chunks=3).time == pytest.approx(24 + 3)
    assert pipeline.simulate(kind.one_f_one_b, 2, 1, costs=pipeline.StageCosts(transfer=5)).time == 16

    lists = pipeline.instructions(kind.one_f_one_b, 2, 1)
    assert list(map(str, lists[1])) == ["receive_activation 0", "forward 0", "backward 0", "send_gradient 0"]
    with pytest.raises(ValueError, match="deadlocks: stage 0 at receive_gradient 0, stage 1 at receive_activation 0"):
        pipeline.simulate([[*lists[0][2:], *lists[0][:2]], lists[1]], 2, 1)
    with pytest.raises(ValueError, match="got lists for 1 stages, expected 2"):
        pipeline.simulate(lists[:1], 2, 1)
    with pytest.raises(ValueError, match="got 0 stages, 1 micro-batches"):
        pipeline.simulate(kind.gpipe, 0, 1)
