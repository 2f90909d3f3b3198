# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Named states of torch's generator: one that ranks sharing a model have alike, and one that each has for itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # DeepSpeed's and Megatron's, between the two seeds
mpu: Any = None  # as checkpointing.configure was given it


def _get() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set(state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state) if torch.cuda.is_available() else torch.set_rng_state(state)


class RngTracker:
    """Megatron's tracker. Of the GPU's generator where there is one, else of the CPU's."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets the states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Sets them."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds the state of a generator with this seed. Errors: ValueError if the name or the seed is there."""
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"RngTracker.add: the name {name!r} or the seed {seed} is there already; reset() first")
        self.seeds_.add(seed)
        before = _get()
        torch.manual_seed(seed)
        self.states_[name] = _get()
        _set(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draws from the named state within. Errors: ValueError if there is none."""
        if name not in self.states_:
            raise ValueError(
                f"RngTracker.fork: no state {name!r}; call model_parallel_cuda_manual_seed(seed) or add() before"
            )
        before = _get()
        _set(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get()
            _set(before)


_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """The one tracker."""
    return _tracker


def _model_parallel_rank() -> int:
    """The rank in the mpu that configure() was given, else 0."""
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 0


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds torch alike on ranks that share a model, and the tracker's state by seed + 2718 + their number."""
    torch.manual_seed(seed)
    _tracker.reset()
    _tracker.add(_MODEL_PARALLEL, seed + _OFFSET + _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the tracker's state anew."""
    with _tracker.fork():
        torch.manual_seed(seed + _OFFSET + _model_parallel_rank())


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose second call draws from the tracker what its first one drew: for what is computed again."""
    if not _tracker.states_:
        return function
    began: dict[str, torch.Tensor] = {}

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if not began:
            began.update(_tracker.get_states())
            return function(*args, **kwargs)
        now = _tracker.get_states()
        _tracker.set_states(dict(began))
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(now)

    return run
