# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's idioms for gradients that the engine has: when ranks drop them, and which looks have no oracle."""

from actions.programs import pick

from reference.expected import UndefinedError

REHUNG = "where the gradient of a parameter is that had another type meanwhile"


def check_looks(life, act):
    if act["act"] != "set_grad":
        return
    if any(rank.rehung for rank in life.ranks):
        raise UndefinedError(REHUNG)
    if act["how"] != "values" and any(rank.sums for rank in life.ranks):
        raise UndefinedError("what .grad shows of gradients that the engine has: tests/python/idioms")


def drops(life, act):
    """The model's zero_grad(): .grad set by hand goes; returns whether what the engine has goes too, on all ranks."""
    if any(rank.rehung for rank in life.ranks):
        raise UndefinedError(REHUNG)
    calls = [rank for rank in life.ranks if pick(act.get("on", True), rank.rank)]
    for rank in calls:
        rank.perform(act)
    having = [rank for rank in calls if rank.sums]
    if having and len(having) < len(life.ranks):
        raise UndefinedError("what becomes of gradients that some ranks drop alone: tests/python/idioms")
    return bool(having)
