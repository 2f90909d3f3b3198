# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a drawn program, compares its updates with plain torch's, and makes one that fails smaller."""

import copy
import itertools
import json
import time

from drawn.model import make
from drawn.program import INTERRUPTS, RIGHT
from drawn.rank import CALL

TOLERANCE = 2e-3  # of the largest element of an update; faults move halves and tenths
NAMED = ("ConfigError", "PipelineError", "ElsewhereError", "CheckpointError", "NonFiniteError", "DriftError")


def is_right(program):
    """Whether it has nothing but what is right in each mesh: then an error is none of a refusal."""
    return not any(program["steps"]) and {*program["model"]["traits"]} <= {*RIGHT}


def _must_work(program, step):
    """Whether a refusal is a finding: where all is right, and in a handler, where nothing else can be done."""
    return is_right(program) or (step >= 0 and any(idiom in INTERRUPTS for idiom in program["steps"][step]))


def _is_named(result):
    """Whether an error is one of the product's own about the program, and not torch's or a lost peer's."""
    _, _, name, _, file, *_ = result
    return name in NAMED or (name in ("ValueError", "TypeError") and "/deeptide/" in file)


def _judge_errors(program, results, refusals):
    """None for a refusal by name; else the finding."""
    raised = [(rank, each) for rank, each in enumerate(results) if each[0] == "raised"]
    named = [(rank, each) for rank, each in raised if _is_named(each)]
    rank, chosen = (named or raised)[0]
    text = f"rank {rank}, step {chosen[5]}: {chosen[2]}: {chosen[3]}\n{'' if named else chosen[6]}"
    if not named:
        return ("error", "model", chosen[2]), text
    return (("refused", "model"), text) if refusals or _must_work(program, chosen[5]) else None


def _apart(name, got, wanted, before):
    """How far an update, or a value, is from plain torch's, or an empty text."""
    if got.shape != wanted.shape:
        return f"{name} has the shape {tuple(got.shape)}, plain torch's {tuple(wanted.shape)}"
    size = (wanted - before).abs().max().item() if before is not None else wanted.abs().max().item()
    worst = (got.float() - wanted.float()).abs().max().item() if got.numel() else 0.0
    if worst <= TOLERANCE * size + 1e-6 * (1 + wanted.abs().max().item()):
        return ""
    return f"{name} is {worst / size if size else worst:.3g} of its update apart"


def _differs(program, plain, results):
    """The first difference, or an empty text."""
    tied = {"lm_head.weight"} if "tie" in program["model"]["traits"] else set()  # of two names
    fresh = {name: value.detach() for name, value in make(program["model"], program["seed"]).named_parameters()}
    for index, (what, wanted) in enumerate(plain):
        looks = [each[1][index] for each in results]
        if any(look[0] != what for look in looks):
            return f"look {index}: {[look[0] for look in looks]}, plain torch's {what}"
        values = [look[1] for look in looks if look[1] is not None]
        if isinstance(wanted, float):
            far = [value for value in values if not abs(value - wanted) <= TOLERANCE * abs(wanted)]
            if far or not values:
                return f"look {index}, {what}: {far}, plain torch {wanted}"
            continue
        if what == "state":  # of all stages together
            values = [{name: value for each in values for name, value in each.items()}, *values]
        for rank, found in enumerate(values):
            missing = wanted.keys() - found.keys() - tied
            if missing and (what != "state" or rank == 0):
                return f"look {index}, {what}: without {sorted(missing)[:4]}, in all {len(missing)}"
            for name in wanted.keys() & found.keys():
                before = fresh.get(name) if what == "state" else None
                if text := _apart(name, found[name], wanted[name], before):
                    return f"look {index}, {what}: {text}"
    return ""


def found_in(runner, program, refusals=False):
    """None, or the finding: (signature, text)."""
    size = program["stages"] * program["tensor"]
    logs, results = runner.run_ranks(CALL, json.dumps(program), size, limit=60)
    if results[0] is not None and results[0][0][0] == "raised":
        return None  # plain torch refuses the program, too
    if None in results:
        late = [rank for rank, each in enumerate(results) if each is None]
        return ("hang", "model"), f"ranks {late} did not end: {[log and log[1][-1500:] for log in logs]}"
    plain, results = results[0][0][1], [each[1] for each in results]
    if any(each[0] == "raised" for each in results):
        return _judge_errors(program, results, refusals)
    text = _differs(program, plain, results)
    return (("value", "model"), text) if text else None


def _smaller(program):
    """Programs with one thing less."""

    def changed(change):
        other = copy.deepcopy(program)
        change(other)
        return other

    traits = program["model"]["traits"]
    for name in sorted(traits.keys() - {"form"}):
        yield changed(lambda p, name=name: p["model"]["traits"].pop(name))
    for step, idioms in enumerate(program["steps"]):
        for place in range(len(idioms)):
            yield changed(lambda p, step=step, place=place: p["steps"][step].pop(place))
    if len(program["steps"]) > 1:
        yield changed(lambda p: p["steps"].pop())
        yield changed(lambda p: p["steps"].pop(0))
    simple = {"tensor": 1, "stages": 1, "gas": 1, "zero": 0, "policy": "", "momentum": 0.0, "schedule": "1f1b"}
    for key, value in {**simple, "cut": "by_block", "through": "loop"}.items():
        if program[key] != value:
            yield changed(lambda p, key=key, value=value: p.update({key: value}))
    if program["model"]["frozen"]:
        yield changed(lambda p: p["model"].update(frozen=[]))
    if traits["form"] != "tensor":
        yield changed(lambda p: p["model"]["traits"].update(form="tensor"))


def _shrunk(runner, program, found, end):
    """(the smallest program that fails alike, its finding)."""
    again = True
    while again and time.monotonic() < end:
        again = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if smaller["stages"] == 1 and smaller["through"] == "train_batch":
                smaller["through"] = "loop"
            other = found_in(runner, smaller, found[0][0] == "refused")
            if other and other[0] == found[0]:
                program, found, again = smaller, other, True
                break
    return program, found


def try_program(runner, program, seconds_to_shrink=0, refusals=False):
    """None, or what was found as (signature, text)."""
    found = found_in(runner, program, refusals)
    if not found:
        return None
    end = time.monotonic() + seconds_to_shrink
    program, found = _shrunk(runner, program, found, end)
    names = sorted({*program["model"]["traits"], *itertools.chain(*program["steps"])} - {"form"})
    where = f"stages {program['stages']}, tensor {program['tensor']}: {' '.join(names)}"
    return (*found[0], where), f"{found[1]}\n{json.dumps(program)}"
