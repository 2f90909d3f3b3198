# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of one layer on several stages: the first one owns and trains them, the others borrow them for a step.

So each is sharded, stepped, clipped and saved once, at every stage of ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deeptide.pipeline.passing.letters import Letters, Subject

if TYPE_CHECKING:
    from deeptide.pipeline.module import PipelineModule


class Place(NamedTuple):
    """The place of a parameter in a module."""

    module: torch.nn.Module
    attribute: str
    is_trained: bool
    is_here: bool = True  # this stage uses the module


class Tie(NamedTuple):
    """Parameters that several stages use; the first one owns them. Alike on those stages, but for `is_here`."""

    key: str
    stages: list[int]
    parameters: list[list[Place]]  # of each parameter


def _places(layer: torch.nn.Module) -> list[list[Place]]:
    """The places of each parameter, in the order of all stages."""
    found: dict[int, list[Place]] = {}
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append(Place(module, name, parameter.requires_grad))
    return list(found.values())


def _added(held: Any, new: Any) -> Any:
    return new if held is None else held if new is None else held + new


@dataclass
class _Owned:
    key: str
    places: list[Place]  # one of each parameter
    borrowers: list[int]

    def parameters(self) -> list[torch.Tensor]:
        return [getattr(place.module, place.attribute) for place in self.places]


@dataclass
class _Borrowed:
    """Parameters that are plain tensors here, new ones in each step."""

    key: str
    owner: int
    parameters: list[list[Place]]
    values: list[torch.Tensor] = field(default_factory=list)
    sums: list[torch.Tensor | None] = field(default_factory=list)  # of gradients, over micro-batches

    def put(self, values: list[torch.Tensor], with_gradients: bool) -> None:
        self.values = [
            value.requires_grad_(with_gradients and places[0].is_trained)
            for value, places in zip(values, self.parameters, strict=True)
        ]
        self.sums = [None] * len(values)
        for places, value in zip(self.parameters, self.values, strict=True):
            for place in places:
                if place.is_here:
                    setattr(place.module, place.attribute, value)

    def add_gradients(self) -> None:
        """After a backward. Sums are in fp32 at least, as the engine's are."""
        for index, value in enumerate(self.values):
            gradient, value.grad = value.grad, None
            if gradient is None:
                continue
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            held = self.sums[index]
            self.sums[index] = gradient if held is None else held.add_(gradient)


class Ties:
    """This stage's part of parameters that stages share. Those that are borrowed are no parameters of its modules."""

    is_open = False  # between micro-batches of a step that the program runs one by one: what was lent stays

    def __init__(self, ties: Iterable[Tie], here: int) -> None:
        self._owned: list[_Owned] = []
        self._borrowed: list[_Borrowed] = []
        for tie in ties:
            if here == tie.stages[0]:
                self._owned.append(_Owned(tie.key, [places[0] for places in tie.parameters], tie.stages[1:]))
            elif here in tie.stages:
                self._borrowed.append(_Borrowed(tie.key, tie.stages[0], tie.parameters))

    def borrowed(self) -> list[Place]:
        """The places of what other stages lend this one."""
        places = [place for tie in self._borrowed for of_one in tie.parameters for place in of_one]
        return [place for place in places if place.is_here]

    def lent(self) -> list[torch.Tensor]:
        """The values that other stages have lent this one for the step."""
        return [value for tie in self._borrowed for value in tie.values]

    def letters(self, training: bool) -> dict[int, int]:
        """How many letters come of which stage in one step."""
        due: dict[int, int] = {}
        for borrowed in self._borrowed:
            due[borrowed.owner] = due.get(borrowed.owner, 0) + 1
        for owned in self._owned if training else ():
            for stage in owned.borrowers:
                due[stage] = due.get(stage, 0) + 1
        return due

    def exchange_values(self, letters: Letters, step: int, training: bool) -> None:
        """Before the first forward: owners send, the others take."""
        with torch.no_grad():
            for owned in self._owned:
                values = [parameter.detach().clone() for parameter in owned.parameters()]
                for stage in owned.borrowers:
                    letters.send(Subject(f"tied weights of '{owned.key}'", 0, step), values, stage, is_own=True)
        for borrowed in self._borrowed:
            values = letters.receive(Subject(f"tied weights of '{borrowed.key}'", 0, step), borrowed.owner)
            borrowed.put(values, with_gradients=training)

    def add_gradients(self) -> None:
        """After each backward."""
        for borrowed in self._borrowed:
            borrowed.add_gradients()

    def send_gradients(self, letters: Letters, step: int) -> None:
        """After the last backward and what it sends."""
        for borrowed in self._borrowed:
            subject = Subject(f"tied gradient of '{borrowed.key}'", 0, step)
            letters.send(subject, borrowed.sums, borrowed.owner, is_own=True)
            borrowed.sums = [None] * len(borrowed.sums)

    def take_gradients(self, letters: Letters, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """An owner's parameters, in its last backward, and what the borrowers' gradients add to theirs, in fp32."""
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for owned in self._owned:
            sums: list[Any] = [None] * len(owned.parameters())
            for stage in owned.borrowers:
                got = letters.receive(Subject(f"tied gradient of '{owned.key}'", 0, step), stage)
                sums = [_added(held, new) for held, new in zip(sums, got, strict=True)]
            for parameter, gradient in zip(owned.parameters(), sums, strict=True):
                if gradient is not None:
                    parameters.append(parameter)
                    gradients.append(gradient)
        return parameters, gradients


def ties_of_layers(model: PipelineModule) -> Ties:
    """The ties of a model's TiedLayerSpecs; takes out the parameters that this stage borrows."""
    ties = []
    here = model.stage_id
    for key, stages in model.stages_of_ties().items():
        if here not in stages or len(stages) == 1:
            continue
        layer = model.tied_modules[key]
        ties.append(Tie(key, stages, _places(layer)))
        if here == stages[0]:
            continue
        for module in layer.modules():
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                delattr(module, name)
                setattr(module, name, None)
    return Ties(ties, here)
