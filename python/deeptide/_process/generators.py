# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The random generators of a rank: torch's of the host and the device, Python's and NumPy's.

Whoever notes, compares, sends or restores their states does it here, so that none of them is left out. Generators that
a program has made itself, as by numpy.random.default_rng(), are its own.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")

_PYTHON_VERSION = 3  # of random.getstate()
_WORDS = 625  # of Python's Mersenne Twister: its state and the place in it; NumPy has the place apart
_GAUSS = struct.Struct("<?d")  # whether a normal number is left over, and which
_PLACE = struct.Struct("<?i")  # of NumPy: whether it is loaded, and the place


def _numpy_state() -> Any:
    """NumPy's global state. None: it is not loaded, or has another bit generator than its default."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    return state if state is not None and state["bit_generator"] == "MT19937" else None


def of_interpreter() -> bytes:
    """The states of Python's and NumPy's; always as many bytes."""
    _, words, gauss = random.getstate()
    parts = [array("I", words).tobytes(), _GAUSS.pack(gauss is not None, gauss or 0.0)]
    state = _numpy_state()
    if state is None:
        return b"".join([*parts, _PLACE.pack(False, 0), bytes(4 * (_WORDS - 1)), _GAUSS.pack(False, 0.0)])
    key, place = state["state"]["key"], state["state"]["pos"]
    return b"".join(
        [*parts, _PLACE.pack(True, place), key.tobytes(), _GAUSS.pack(bool(state["has_gauss"]), state["gauss"])]
    )


def set_interpreter(states: bytes) -> None:
    """Sets Python's and NumPy's; NumPy's stays where it was not loaded."""
    words, end = array("I", states[: 4 * _WORDS]), 4 * _WORDS
    has_gauss, gauss = _GAUSS.unpack_from(states, end)
    random.setstate((_PYTHON_VERSION, tuple(words), gauss if has_gauss else None))
    end += _GAUSS.size
    is_loaded, place = _PLACE.unpack_from(states, end)
    if not is_loaded or importlib.util.find_spec("numpy") is None:
        return
    import numpy

    end += _PLACE.size
    key = numpy.frombuffer(states, dtype=numpy.uint32, count=_WORDS - 1, offset=end)
    has_gauss, gauss = _GAUSS.unpack_from(states, end + key.nbytes)
    numpy.random.set_state(("MT19937", key, place, int(has_gauss), gauss))


def states() -> list[torch.Tensor]:
    """Torch's of the host, those of Python and NumPy, and torch's of the device where there is one."""
    found = [torch.get_rng_state(), torch.frombuffer(bytearray(of_interpreter()), dtype=torch.uint8)]
    return [*found, torch.get_device_module().get_rng_state()] if torch.accelerator.is_available() else found


def set_states(values: list[torch.Tensor]) -> None:
    """Values: as `states` returned them, on any device."""
    host, interpreter, *device = values
    torch.set_rng_state(host.cpu())
    set_interpreter(interpreter.cpu().numpy().tobytes())
    for value in device:
        torch.get_device_module().set_rng_state(value.cpu())


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether nothing was drawn between two calls of `states`."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@contextmanager
def kept() -> Iterator[None]:
    """Gives all generators the states back that they had, where something was drawn inside."""
    before = states()
    try:
        yield
    finally:
        if not are_equal(before, states()):
            set_states(before)


@contextmanager
def alike() -> Iterator[None]:
    """Inside, all generators give the same numbers each time; afterwards they have their states back."""
    with kept():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        yield


def repeatable(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function, whose later calls draw from Python and NumPy what the first drew, as a checkpoint calls it.

    Torch's generators are the checkpoint's own task. Where the first call drew nothing, later ones leave all as it is.
    """
    if torch.compiler.is_compiling():
        return function
    first: bytes | None = None
    drew = False

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> _Result:
        nonlocal first, drew
        if first is None:
            first = of_interpreter()
            result = function(*args, **kwargs)
            drew = first != of_interpreter()
            return result
        if not drew:
            return function(*args, **kwargs)
        now = of_interpreter()
        set_interpreter(first)
        try:
            return function(*args, **kwargs)
        finally:
            set_interpreter(now)

    return run
