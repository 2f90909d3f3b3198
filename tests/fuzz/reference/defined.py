# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Programs about which something is said: acts and settings that the oracle knows no answer to are left out."""

from actions.programs import settings_of

from reference import oracle
from reference.expected import OpenError, UndefinedError


def without_undefined(program):
    """The program without the acts that nothing is said about at one of its settings."""
    for setting in {oracle.traits_of(program, setting): setting for setting in settings_of(program)}.values():
        while True:
            try:
                oracle.expected_of(program, setting, avoid=False)
                break
            except UndefinedError as reason:
                phase, number = reason.args[:2]
                if number >= len(phase["acts"]):
                    raise
                del phase["acts"][number]
    return program


def settings_for(program, draw, count):
    """Some settings where no fault is known that the program meets."""
    by_traits = {}
    for setting in settings_of(program):
        by_traits.setdefault(oracle.traits_of(program, setting), []).append(setting)
    settings = [s for alike in by_traits.values() if not _meets_open(program, alike[0]) for s in alike]
    return sorted(draw.sample(settings, min(count, len(settings))))


def _meets_open(program, setting):
    try:
        oracle.expected_of(program, setting)
    except OpenError:
        return True
    return False
