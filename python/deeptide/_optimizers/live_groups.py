# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps live param groups and the core's hyper-parameters equal; what has not changed costs a comparison."""

from __future__ import annotations

from typing import Any

import torch

from deeptide import _C
from deeptide._optimizers.groups import GroupKey, ParamGroup, keys_of, numbers_of, write_key


def _frozen(value: Any) -> Any:
    """A value that stays when a tensor or a list is written in place, and compares with what it was made of."""
    if isinstance(value, (float, int)):
        return value
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


class LiveGroups:
    """The groups that the core has, out of an optimizer's `param_groups`.

    Compares raw values: 2,000 groups take a millisecond, and each one that has changed a few microseconds.
    """

    def __init__(
        self, info: _C.OptimizerInfo, indices: list[int], param_groups: list[ParamGroup], core: _C.Engine
    ) -> None:
        self._indices = indices  # in param_groups, by the core's number
        self._keys = list(keys_of(info).values())
        self._names = [key.key for key in self._keys]
        # Group after group, key after key: the values last seen, frozen; None before the first.
        self._seen: list[Any] = [None] * (len(indices) * len(self._keys))
        self._tensors: set[int] = set()  # the places whose values are tensors
        self._held = [core.hyperparameters(number) for number in range(len(indices))]  # by the core
        self._version = core.hyperparameters_version()  # at the last look
        for number, index in enumerate(indices):
            self._write(number, param_groups[index], self._held[number])

    def pull(self, param_groups: list[ParamGroup], core: _C.Engine) -> None:
        """Writes into the groups what the core itself has changed: by its schedule, or by loading a checkpoint."""
        version = core.hyperparameters_version()
        if version == self._version:
            return
        for number, index in enumerate(self._indices):
            values = core.hyperparameters(number)
            if values != self._held[number]:
                self._held[number] = values
                self._write(number, param_groups[index], values)
        self._version = version

    def _write(self, number: int, group: ParamGroup, values: _C.Hyperparameters) -> None:
        for place, key in enumerate(self._keys, number * len(self._keys)):
            numbers = [values[name] for name in key.names]
            if self._seen[place] != (tuple(numbers) if key.several else numbers[0]):
                write_key(group, key, numbers)
                self._see(place, group[key.key])

    def _see(self, place: int, value: Any) -> None:
        self._seen[place] = _frozen(value)
        if isinstance(value, torch.Tensor):
            self._tensors.add(place)

    def push(self, param_groups: list[ParamGroup], core: _C.Engine) -> None:
        """Sets in the core what was written into the groups since the last look. Errors: ConfigError by key."""
        groups = [param_groups[index] for index in self._indices]
        try:
            now = [group[name] for group in groups for name in self._names]
        except KeyError:
            self._put_back(groups)
            now = [group[name] for group in groups for name in self._names]
        for place in self._tensors:
            now[place] = _frozen(now[place])  # to compare two tensors costs more than to read one
        if now == self._seen:
            return
        width = len(self._keys)
        for number, group in enumerate(groups):
            first = number * width
            if now[first : first + width] != self._seen[first : first + width]:
                changed = [i for i in range(width) if now[first + i] != self._seen[first + i]]
                self._set(number, [(self._keys[i], now[first + i]) for i in changed], core)
                for i in changed:
                    self._see(first + i, group[self._names[i]])

    def _set(self, number: int, changed: list[tuple[GroupKey, Any]], core: _C.Engine) -> None:
        numbers = [numbers_of(key, value) for key, value in changed]  # all, before any is set
        held = _C.Hyperparameters(self._held[number])  # which stays as it is where the core refuses
        for (key, _), values in zip(changed, numbers, strict=True):
            for name, value in zip(key.names, values, strict=True):
                held[name] = value
        core.set_hyperparameters(number, held)
        self._held[number] = held

    def _put_back(self, groups: list[ParamGroup]) -> None:
        """Gives groups the keys that a program took out, with what the core holds."""
        for group, held in zip(groups, self._held, strict=True):
            for key in self._keys:
                if key.key not in group:
                    write_key(group, key, [held[name] for name in key.names])
