# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The fuzzer (docs/testing.md): a few of its programs, those that once found a fault, and that it finds and shrinks."""

import copy
import json
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))

import generate  # noqa: E402
import shrink  # noqa: E402
import torch  # noqa: E402
from actions import surroundings  # noqa: E402
from actions.acts import ACTS  # noqa: E402
from actions.programs import Setting, dump, settings_of  # noqa: E402
from drawn import program as drawn_programs  # noqa: E402
from drawn import trial  # noqa: E402
from drawn.model import make as make_drawn  # noqa: E402
from drawn.sides import Plain  # noqa: E402
from reference import defined, oracle  # noqa: E402
from reference.verdict import Judge, Mismatch  # noqa: E402
from runner import Runner  # noqa: E402

APART_3 = Setting(3, shared=False)


@pytest.fixture(scope="module")
def runner():
    return Runner()


def mended(name):
    return json.loads((FUZZ / "mended" / f"{name}.json").read_text())


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_a_program_gives_what_plain_torch_gives(runner, seed):
    program = generate.program_of(seed)
    settings = defined.settings_for(program, generate.random.Random(seed), 2)
    assert not list(map(str, shrink.judged(runner, program, settings)))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((FUZZ / "mended").glob("*.json")), ids=lambda path: path.stem)
def test_what_was_mended_stays(runner, path):
    program = json.loads(path.read_text())
    assert not list(map(str, shrink.judged(runner, program, settings_of(program))))


def test_every_act_occurs():
    programs = [generate.Generator(seed).program() for seed in range(300)]
    seen = {act["act"] for program in programs for phase in program["phases"] for act in phase["acts"]}
    assert {*ACTS, *oracle.COLLECTIVE, *surroundings.ACTS} - {"counters"} == seen


@pytest.mark.costly
def test_seeds_reproduce_and_programs_travel_as_text():
    one, other = generate.program_of(3), generate.program_of(3)
    assert one == other == json.loads(dump(one))


@pytest.mark.costly
def test_an_engine_that_clips_too_little_is_found(runner):
    program = mended("a_schedule_after_the_step")
    run = runner.run(program, [APART_3])
    assert not Judge(program).mismatches(run)
    (found,) = Judge({**program, "clipping": 0.01}).mismatches(run)
    assert (found.kind, found.act["act"]) == ("value", "clone")


def test_a_rank_that_does_not_end_is_a_hang(runner):
    program = mended("each_name_of_a_tie_by_hand")
    (found,) = Judge(program).mismatches(runner.run(program, [APART_3], limit=0.01))
    assert found.kind == "hang"
    assert "most recent call first" in found.text  # its stacks


def test_a_failing_program_shrinks_to_what_matters(monkeypatch):
    program = generate.program_of(11)
    phase = program["phases"][-1]
    phase["acts"] = [*phase["acts"], {"act": "rebind", "seed": 5}, {"act": "step"}, {"act": "add_group"}]
    whole = copy.deepcopy(program)

    def judged(runner, program, settings, avoid):
        acts = [act for phase in program["phases"] for act in phase["acts"]]
        if not {"rebind", "add_group"} <= {act["act"] for act in acts}:
            return []
        return [Mismatch("value", settings[0], 0, 0, 0, {"act": "rebind"}, "")]

    monkeypatch.setattr(shrink, "judged", judged)
    first = judged(None, program, [APART_3], True)[0]
    smallest, settings, _ = shrink.Shrinker(None, seconds=60).shrink(program, first)
    (phase,) = smallest["phases"]
    assert [act["act"] for act in phase["acts"]] == ["rebind", "add_group"]
    assert (phase["gas"], phase["bf16"], smallest["model"]["blocks"]) == (1, False, 1)
    assert settings == [APART_3]
    assert program == whole


# -- drawn models -----------------------------------------------------------------------------------------------------


def test_drawn_models_have_every_trait_and_idiom_and_travel_as_text():
    programs = [drawn_programs.program_of(seed) for seed in range(300)]
    assert programs[3] == json.loads(json.dumps(drawn_programs.program_of(3)))
    traits = {trait for program in programs for trait in program["model"]["traits"]}
    idioms = {idiom for program in programs for step in program["steps"] for idiom in step}
    assert traits == {"form", *drawn_programs.traits_of(generate.random.Random(0), 3, 4)}
    assert idioms == {*drawn_programs.IDIOMS}
    assert {(each["stages"], each["tensor"]) for each in programs} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert all(trial.is_right(drawn_programs.program_of(seed, only_right=True)) for seed in range(100))


def _drawn_results(change):
    """Plain torch's looks of a program of two stages, and those of two ranks that saw the same but for `change`."""
    program = {**drawn_programs.program_of(0, only_right=True), "stages": 2, "tensor": 1}
    plain = Plain(program).run()
    halves = [[(what, copy.deepcopy(value)) for what, value in plain] for _ in range(2)]
    for stage, looks in enumerate(halves):
        state = looks[-1][1]
        for name in [name for name in state if ("layers.0" in name or "layers.1" in name) != (stage == 0)]:
            del state[name]
    change(halves)
    return program, plain, [("ok", looks) for looks in halves]


def test_half_an_update_of_a_drawn_model_is_found():
    assert not trial._differs(*_drawn_results(lambda halves: None))

    def halve(halves):
        program = {**drawn_programs.program_of(0, only_right=True)}
        fresh = dict(make_drawn(program["model"], program["seed"]).named_parameters())
        name = next(name for name in halves[1][-1][1] if name in fresh and fresh[name].requires_grad)
        value = halves[1][-1][1][name]
        with torch.no_grad():
            value.add_(fresh[name]).mul_(0.5)

    assert "0.5 of its update apart" in trial._differs(*_drawn_results(halve))
    assert "without" in trial._differs(*_drawn_results(lambda halves: halves[0][-1][1].popitem()))


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_a_drawn_model_that_is_right_trains_as_plain_torch(runner, seed):
    assert trial.try_program(runner, drawn_programs.program_of(seed, only_right=True)) is None
