# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Adds the Python front's part to a checkpoint: client and extra state, a caller's schedule, the data position."""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils._pytree import tree_map

from deeptide._C import CheckpointError, ConfigError
from deeptide._model.extra_state import read_extra_states, write_extra_states
from deeptide.schedule import ConfigSchedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deeptide.engine import Engine

_PRIVATE_KEY = "__deeptide__"
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


NOT_SAVED = (
    "Nothing was saved, since a checkpoint needs a part of every rank: the last checkpoint is as it was, and a new run "
    'continues from it. For signals, "checkpoint": {"on_preempt": …} has all ranks save at one step.'
)


class LastBoundary:
    """Positions of data and schedules when the last step ended: a save within an accumulation takes them."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.less_work: dict[str, Any] | None = None

    def note(self, engine: Engine) -> None:
        """A step has ended, or a checkpoint was loaded."""
        if hasattr(engine.training_dataloader, "position"):
            self.loader = engine.training_dataloader.position()
        if engine._less_work is not None:
            self.less_work = engine._less_work.position()


def handles_exception() -> bool:
    """Whether the program handles an exception that may have ended a step's work. An iterator's end is none."""
    error = sys.exc_info()[1]
    return error is not None and not isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit))


def _pack(value: object) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _unpack(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """The line that says what is wrong; torch.load writes advice around it."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    return text.splitlines()[0] if text else type(error).__name__


def _pack_extra_states(states: dict[str, Any]) -> str:
    """All states in one text. Errors: ConfigError naming the first that could not be read back."""
    try:
        text = _pack(states)
        _unpack(text)
    except Exception:
        for key, state in states.items():
            try:
                _unpack(_pack(state))
            except Exception as error:
                raise ConfigError(
                    f"save_checkpoint: '{key}' (what get_extra_state returned) is {type(state).__name__}, expected "
                    "what torch.load(weights_only=True) reads back: tensors, numbers, strings, lists, dicts and "
                    f"classes given to torch.serialization.add_safe_globals. {_reason(error)}"
                ) from error
        raise
    return text


def _unpack_extra_states(text: str) -> dict[str, Any]:
    try:
        states: dict[str, Any] = _unpack(text)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the checkpoint's extra states (get_extra_state) hold a class that torch does not know to be safe here; "
            "call torch.serialization.add_safe_globals as the program did that saved them. Parameters and buffers "
            f"were loaded. {_reason(error)}"
        ) from error
    return states


def _tuples_in(value: object) -> Iterator[list[str | int]]:
    """Paths of the tuples in nested dicts and lists, inner ones first: JSON makes lists of them."""
    entries: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    for key, entry in entries:
        yield from ([key, *path] for path in _tuples_in(entry))
    if isinstance(value, tuple):
        yield []


def _array_of(numbers: list[Any], dtype: str, shape: list[int]) -> torch.Tensor:
    """`numbers`: as JSON has them; what is not finite is {"value": "nan"} there."""
    plain = [float(number["value"]) if isinstance(number, dict) else number for number in numbers]
    return torch.tensor(plain, dtype=_TYPES[dtype]).view(shape)


def _restored(value: Any, kind: str, note: list[Any]) -> Any:
    if kind == "tuples":
        return tuple(value)
    if kind == "integer_keys":
        return {int(key): entry for key, entry in value.items()}
    array = _array_of(value, *note)
    return array if kind == "tensors" else array.numpy()


def _restore_notes(value: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
    """Restores values that JSON had to write in another way: tensors, numpy's arrays, integer keys, tuples."""
    found: list[tuple[list[str | int], str, list[Any]]] = []
    for kind in ("tensors", "arrays"):
        found += [(path, kind, rest) for path, *rest in notes.get(kind, ())]
    for kind in ("integer_keys", "tuples"):
        found += [(path, kind, []) for path in notes.get(kind, ())]
    # Inner ones first: a path leads through what is still as JSON has it.
    for path, kind, note in sorted(found, key=lambda entry: -len(entry[0])):
        parent: Any = value
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = _restored(parent[path[-1]], kind, note)
    return value


def _pack_schedule(schedule: Any) -> str:
    """Errors: ConfigError where load_checkpoint could not read it. Numbers of numpy become Python's."""
    state = tree_map(lambda value: value.item() if isinstance(value, numpy.generic) else value, schedule.state_dict())
    text = _pack(state)
    try:
        _unpack(text)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"save_checkpoint: the state of {type(schedule).__name__} (its state_dict()) could not be read back; "
            "expected tensors, numbers, strings, lists, dicts and classes given to "
            f"torch.serialization.add_safe_globals. {_reason(error)}"
        ) from error
    return text


def _check_json(value: object, path: str) -> None:
    """Raises ConfigError naming the first key that JSON would refuse or give back changed."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{path}: key {key!r} is {type(key).__name__}, expected str: JSON knows no other keys"
                )
            _check_json(entry, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check_json(entry, f"{path}[{index}]")
    else:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: {error}; client_state holds what JSON can: numbers, strings, lists, dicts. "
                "Save tensors with torch.save beside the checkpoint"
            ) from error


def pack_client_state(client_state: dict[str, Any] | None, engine: Engine, within: bool) -> str:
    """The JSON text that the core saves beside its own state. `within`: an accumulation, whose start is saved."""
    client_state = {} if client_state is None else client_state
    if not isinstance(client_state, dict):
        raise ConfigError(f"client_state: got {type(client_state).__name__}, expected a dict")
    if _PRIVATE_KEY in client_state:
        raise ConfigError(f"client_state: the key {_PRIVATE_KEY!r} is the engine's own; use another")
    _check_json(client_state, "client_state")
    private: dict[str, Any] = {}
    if extra_states := read_extra_states(engine.module):
        private["extra_states"] = _pack_extra_states(extra_states)
    if engine.training_dataloader is not None:
        position = [engine._last_boundary.loader] if within and engine._last_boundary.loader is not None else []
        private["loader"] = engine.training_dataloader.state_dict(*position)
    if engine._less_work is not None:
        private["less_work"] = engine._less_work.state_dict(engine._last_boundary.less_work if within else None)
    if engine._activations is not None and (chosen := engine._activations.state_dict()) is not None:
        private["activations"] = chosen
    if _is_client_schedule(engine.lr_scheduler):
        private["scheduler"] = _pack_schedule(engine.lr_scheduler)
    if tuples := list(_tuples_in(client_state)):
        private["tuples"] = tuples
    return json.dumps({**client_state, _PRIVATE_KEY: private})


def _is_client_schedule(schedule: object) -> bool:
    return schedule is not None and not isinstance(schedule, ConfigSchedule) and hasattr(schedule, "state_dict")


def _restore_extra_states(private: dict[str, Any], engine: Engine, strict: bool) -> None:
    """A checkpoint without any is no error: C++ programs save none."""
    saved = "extra_states" in private
    states = _unpack_extra_states(private["extra_states"]) if saved else {}
    for difference in write_extra_states(engine.module, states, strict and saved):
        engine._say_once(f"load_checkpoint: {difference}", "warning")


def _restore_schedule(private: dict[str, Any], engine: Engine, rates_too: bool) -> None:
    """rates_too: the groups have the checkpoint's rates, maybe one set by hand, which a schedule could write over."""
    schedule = engine.lr_scheduler
    if "scheduler" in private:
        state = _unpack(private["scheduler"])
    else:
        plain = private["plain_scheduler"]
        state = _restore_notes(plain["values"], plain["notes"])["scheduler"]
    groups = getattr(getattr(schedule, "optimizer", engine.optimizer), "param_groups", [])
    rates = [(group, group["lr"]) for group in groups if rates_too and "lr" in group]
    schedule.load_state_dict(state)
    for group, rate in rates:
        group["lr"] = rate


def unpack_client_state(
    text: str, engine: Engine, strict: bool, schedule_too: bool, all_states: bool, rates_too: bool
) -> dict[str, Any]:
    """The caller's client state; restores what `pack_client_state` added, as far as it is there.

    rates_too: the optimizer's groups are the checkpoint's already.
    """
    client_state: dict[str, Any] = json.loads(text)
    private = client_state.pop(_PRIVATE_KEY, {})
    client_state = _restore_notes(client_state, private)
    _restore_extra_states(private, engine, strict)
    if not all_states:
        return client_state
    _restore_positions(private, engine)
    has_schedule = "scheduler" in private or "plain_scheduler" in private
    if schedule_too and has_schedule and _is_client_schedule(engine.lr_scheduler):
        _restore_schedule(private, engine, rates_too)
    return client_state


def _restore_positions(private: dict[str, Any], engine: Engine) -> None:
    if "loader" in private and engine.training_dataloader is not None:
        engine.training_dataloader.load_state_dict(private["loader"])
        engine._own_batches = None  # train_batch() begins where the loader now is
    if "less_work" in private and engine._less_work is not None:
        engine._less_work.load_state_dict(private["less_work"])
    if "activations" in private and engine._activations is not None:
        engine._activations.load_state_dict(private["activations"])
    engine._last_boundary.note(engine)
