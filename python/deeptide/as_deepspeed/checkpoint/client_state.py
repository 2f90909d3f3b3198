# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A script's own state inside a checkpoint: as JSON where it can be, else pickled, as DeepSpeed keeps all of it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import torch
import torch.distributed as dist

from deeptide._C import CheckpointError

_PICKLED = "deepspeed_client_state"


class TagError(CheckpointError, AssertionError):
    """Tags that differ, for which DeepSpeed raises AssertionError where "tag_validation" is "fail"."""


def check_tag(tag: str) -> None:
    """Errors: TagError on every rank, unless all were given the same tag. Collective."""
    tags: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(tags, tag)
    if len(set(tags)) > 1:
        raise TagError(f"save_checkpoint(tag={tag!r}): the ranks give {', '.join(sorted(set(tags)))}; give one tag")


def _comes_back(state: dict[str, Any]) -> bool:
    """Whether JSON gives back just what it was given."""
    try:
        again = json.loads(json.dumps(state, allow_nan=False))
        return bool(again == state and _same_types(again, state))
    except (TypeError, ValueError, RecursionError):
        return False


def _same_types(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return all(_same_types(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return all(map(_same_types, a, b))
    return True


def packed(state: dict[str, Any] | None) -> dict[str, Any]:
    """The form that save_checkpoint of the engine takes."""
    state = {} if state is None else dict(state)
    if _comes_back(state):
        return state
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_PICKLED: base64.b64encode(buffer.getvalue()).decode("ascii")}


def unpacked(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """The state that was given to `packed`. A pickled one may run code of the program that saved it."""
    if state is None or _PICKLED not in state:
        return state
    buffer = io.BytesIO(base64.b64decode(state[_PICKLED]))
    loaded: dict[str, Any] = torch.load(buffer, map_location="cpu", weights_only=False)
    return loaded
