# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Public paths and names of the real DeepSpeed, from surface.txt, which tools/deepspeed_surface.py wrote.

What the table of names lacks is refused by its name, and is never something else.
"""

from __future__ import annotations

import functools
from pathlib import Path

from deeptide.as_deepspeed import INTERFACE_VERSION, NotSupportedError


class MissingAttributeError(NotSupportedError, AttributeError):
    """An attribute of DeepSpeed's that is not here: hasattr() says so."""


@functools.cache
def _lines() -> dict[str, tuple[str, ...]]:
    text = Path(__file__).with_name("surface.txt").read_text(encoding="utf-8")
    pairs = (line.split(": ", 1) for line in text.splitlines())
    return {key: tuple(names.split()) for key, names in pairs}


@functools.cache
def paths() -> frozenset[str]:
    """Every public module of DeepSpeed."""
    return frozenset(
        path
        for key, modules in _lines().items()
        if key.endswith("/")
        for path in (key[:-1], *(f"{key[:-1]}.{module}" for module in modules))
    )


def is_package(module: str) -> bool:
    """Whether DeepSpeed has a folder of that name."""
    return f"{module}/" in _lines()


def members(key: str) -> tuple[str, ...]:
    """Public names of "module", or attributes of "module:Class"; none where they were not read."""
    return _lines().get(key, ())


def refused(key: str, name: str, note: str = "") -> MissingAttributeError | None:
    """The error for an attribute that DeepSpeed's class has; None where it has none of that name either."""
    if name not in members(key):
        return None
    kind = key.partition(":")[2]
    more = note or f"it is in DeepSpeed {INTERFACE_VERSION}, and docs/from-deepspeed.md says what there is instead"
    return MissingAttributeError(f"{kind}.{name} is not supported by Deeptide: {more}")
