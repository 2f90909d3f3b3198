# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer of the caller's: the engine lends it parts of the sharded parameters for each step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from deeptide import _C
from deeptide._C import OptimizerInfo
from deeptide._optimizers.given import AwayState, WithoutHooks, step_alone
from deeptide._optimizers.groups import ParamGroup, keys_of, read_group, write_key

PartState: TypeAlias = list[tuple[str, torch.Tensor, bool]]
Cut: TypeAlias = Callable[[Any], Any]

# Kinds of state that are no tensors are saved under the state's name and one of these.
_NUMBER, _NONE = ":number", ":none"


class PartStepper:
    """Steps parts by a torch optimizer, whose own groups and state are seen as they were outside of its step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        info: OptimizerInfo,
        needs_whole: str,
        groups: list[int],
        parameters: dict[str, torch.Tensor],
    ) -> None:
        """groups: the places in its param_groups, by the core's number. parameters: the model's, by name.

        cuts: makes what a slice has of the state that its whole parameter had, by name; set before `adopt`.
        """
        self.info = info
        self.needs_whole = needs_whole
        self._optimizer = optimizer
        self._groups = groups
        self._parameters = parameters
        self._state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._parts: list[torch.nn.Parameter] = []
        self._of_group: dict[int, list[torch.nn.Parameter]] = {}
        self.cuts: Mapping[str, Cut] = {}

    def adopt(self, parts: Sequence[tuple[str, int, int, torch.Tensor]]) -> None:
        """Takes (parameter, group, first element, values) of each part; and its share of the state there is."""
        held = self._optimizer.state
        for name, group, begin, values in parts:
            part = torch.nn.Parameter(values)
            self._parts.append(part)
            self._of_group.setdefault(self._groups[group], []).append(part)
            parameter = self._parameters[name]
            for key, value in held.get(parameter, {}).items() if held else ():
                if name in self.cuts:
                    value = self.cuts[name](value)
                self._state[part][key] = _share_of(value, parameter, begin, part)
        self._parameters = {}

    def step(self, gradients: Sequence[torch.Tensor | None], groups: Sequence[_C.Hyperparameters]) -> None:
        """One step of all parts that have a gradient."""
        self._follow(groups)
        self._optimizer.state = AwayState()  # the parts have taken it over
        for part, gradient in zip(self._parts, gradients, strict=True):
            part.grad = gradient
        try:
            with self._lent(), WithoutHooks(self._optimizer):
                step_alone(self._optimizer)
        finally:
            for part in self._parts:
                part.grad = None

    def _follow(self, groups: Sequence[_C.Hyperparameters]) -> None:
        """Writes what all ranks agreed on, where the live groups say otherwise."""
        for values, place in zip(groups, self._groups, strict=True):
            group = self._optimizer.param_groups[place]
            if read_group(group, self.info, values) != values:
                for key in keys_of(self.info).values():
                    write_key(group, key, [values[name] for name in key.names])

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Inside, the optimizer's groups hold the parts, and its state is theirs."""
        groups: list[ParamGroup] = self._optimizer.param_groups
        kept = [group["params"] for group in groups], self._optimizer.state
        try:
            for place, group in enumerate(groups):
                group["params"] = self._of_group.get(place, [])
            self._optimizer.state = self._state
            yield
        finally:
            for group, parameters in zip(groups, kept[0], strict=True):
                group["params"] = parameters
            self._state, self._optimizer.state = self._optimizer.state, kept[1]

    def state(self, number: int) -> PartState:
        """(name, value, whether per element) of each entry. Errors: ValueError naming one that is no number."""
        part = self._parts[number]
        entries: PartState = []
        for name, value in self._state.get(part, {}).items():
            if isinstance(value, torch.Tensor):
                self._check_shape(name, value, part)
                entries.append((name, value.detach(), value.shape == part.shape))
            elif value is None:
                entries.append((name + _NONE, torch.zeros(()), False))
            elif isinstance(value, (bool, int, float)):
                dtype = torch.float64 if isinstance(value, float) else None
                entries.append((name + _NUMBER, torch.tensor(value, dtype=dtype), False))
            else:
                raise ValueError(
                    f"{self.info.name}: its state {name!r} is a {type(value).__name__}, which no checkpoint can hold; "
                    "keep tensors and numbers in the state"
                )
        return entries

    def _check_shape(self, name: str, value: torch.Tensor, part: torch.Tensor) -> None:
        if value.shape != part.shape and value.numel() != 1 and not self.needs_whole:
            raise ValueError(
                f"{self.info.name}: its state {name!r} has shape {tuple(value.shape)} for a part of shape "
                f"{tuple(part.shape)}; a state that can be saved has the part's shape, or is one number"
            )

    def set_state(self, number: int, entries: PartState) -> None:
        """Replaces the state of a part by what `state` returned, here or in another world."""
        part = self._parts[number]
        state: dict[str, Any] = {}
        for name, value, per_element in entries:
            if name.endswith(_NONE):
                state[name.removesuffix(_NONE)] = None
            elif name.endswith(_NUMBER):
                state[name.removesuffix(_NUMBER)] = value.item()
            else:
                state[name] = value.to(part.device).view(part.shape) if per_element else value
        self._state.pop(part, None)
        if state:
            self._state[part] = state


def _share_of(value: Any, parameter: torch.Tensor, begin: int, part: torch.Tensor) -> Any:
    """A part's share of a state that a whole parameter has."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return value.detach().reshape(-1)[begin : begin + part.numel()].clone().to(part.device).view(part.shape)
