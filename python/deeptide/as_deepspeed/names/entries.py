# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One line of the table of DeepSpeed's names."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Status(enum.Enum):
    """The standing of a name of DeepSpeed's here, in the words of docs/from-deepspeed.md."""

    works = "works"
    differs = "differs"
    refused = "not here"


class Name(NamedTuple):
    """The stand-in for a name: `target` is "module:attribute"; `note` says what differs, or what to use instead."""

    status: Status
    target: str
    note: str


def works(target: str) -> Name:
    """Does what DeepSpeed's does."""
    return Name(Status.works, target, "")


def differs(target: str, note: str) -> Name:
    """Does what a script needs, in another way; a target without a package is this folder's."""
    return Name(Status.differs, target if target.startswith("deeptide.") else _here(target), note)


def absent(note: str) -> Name:
    """May be imported; its use is an error that names it."""
    return Name(Status.refused, "", note)


def ours(target: str) -> Name:
    """Works, by a module of this folder."""
    return works(_here(target))


def torchs(target: str) -> Name:
    """Works: torch's own; "distributed:barrier" is torch.distributed.barrier."""
    module, _, attribute = target.partition(":")
    return works(f"torch.{module}:{attribute}" if module else f"torch:{attribute}")


def _here(target: str) -> str:
    return f"deeptide.as_deepspeed.{target}"
