# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Stands for the output of a forward on a stage that does not have it: its loss and shapes, or copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.passing.elsewhere import Elsewhere

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_DIMENSIONS = 8
NUMBERS = 5 + _DIMENSIONS  # of a description: kind, value or length, type, has a gradient, dimensions, their sizes

_OTHER, _LOSS, _OBJECT, _SEQUENCE, _TENSOR = range(5)


def loss_in(output: Any) -> torch.Tensor | None:
    """The scalar loss that an output is or has."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    else:
        found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def describe(output: Any) -> list[float]:
    """Numbers that tell the other stages of the last one's output."""
    loss = loss_in(output)
    tensor = output if loss is None else loss
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _TYPES or tensor.dim() > _DIMENSIONS:
        return [float(_OTHER)] + [0.0] * (NUMBERS - 1)
    kind, value = _TENSOR, 0.0
    sizes = [float(size) for size in tensor.shape]
    if loss is not None:
        kind = _LOSS if loss is output else _SEQUENCE if isinstance(output, (tuple, list)) else _OBJECT
        value, sizes = loss.item(), [float(len(output)) if kind == _SEQUENCE else 0.0]
    numbers = [float(kind), value, float(_TYPES.index(tensor.dtype)), float(tensor.requires_grad), float(tensor.dim())]
    return numbers + sizes + [0.0] * (NUMBERS - len(numbers) - len(sizes))


class StageOutput(dict[str, Any]):
    """The last stage's output, of which the other stages have its loss alone: `.loss`, ["loss"] or [0]."""

    def _refuse(self, name: object) -> str:
        return (
            f"the model's output: {name!r} is on the last stage of the pipeline alone, and the others have its loss; "
            "use it where engine.is_last_stage(), or set parallel.pipeline.outputs to broadcast for tensors and numbers"
        )

    def __missing__(self, key: object) -> Any:
        if key == 0 and "loss" in self:
            return self["loss"]
        raise KeyError(self._refuse(key))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(self._refuse(name))


class _Value(torch.autograd.Function):
    """A value with a gradient on a stage that does not compute it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise PipelineError("loss.backward() runs one stage of the pipeline alone: call engine.backward(loss)")


def stand_in(numbers: list[float], device: torch.device) -> Any:
    """Returns a stand-in for the described output."""
    kind = int(numbers[0])
    dtype, has_gradient = _TYPES[int(numbers[2])], bool(numbers[3])
    if kind == _OTHER:
        return StageOutput()
    if kind == _TENSOR:
        shape = [int(size) for size in numbers[5 : 5 + int(numbers[4])]]
        return Elsewhere(torch.empty(shape, dtype=dtype, device="meta"), "the model's output", device)
    loss = torch.tensor(numbers[1], dtype=dtype, device=device)
    if has_gradient:
        loss = _Value.apply(loss.requires_grad_())  # type: ignore[no-untyped-call, unused-ignore]
    if kind == _SEQUENCE:
        return (loss, *[StageOutput() for _ in range(int(numbers[5]) - 1)])
    return loss if kind == _LOSS else StageOutput(loss=loss)


def content_of(output: Any) -> Any:
    """The part of an output that travels: tensors, numbers and texts, in tuples, lists and dictionaries."""
    if isinstance(output, Mapping):
        return {key: content_of(value) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        items = [content_of(item) for item in output]
        return tuple(items) if isinstance(output, tuple) else items
    if output is None or isinstance(output, (torch.Tensor, bool, int, float, str)):
        return output
    return {}  # such as a cache of keys


def with_content(content: Any) -> Any:
    """An output on a stage that was sent its content; dictionaries have attributes, as the model's own output."""
    if isinstance(content, torch.Tensor):
        return _Value.apply(content) if content.requires_grad else content  # type: ignore[no-untyped-call, unused-ignore]
    if isinstance(content, dict):
        return StageOutput({key: with_content(value) for key, value in content.items()})
    if isinstance(content, (tuple, list)):
        return type(content)(map(with_content, content))
    return content
