# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of all parameters of a model before and after its layers are cut, of large ones a few rows' worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from deeptide.tensor.cutting.slices import Slice
from deeptide.tensor.team import Team

_WHOLE = 1 << 14  # elements: a larger gradient is compared by two products with vectors
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_COPY = 1 << 30  # parameters
_LEAST = 1e-3  # of the largest gradient: smaller ones are compared with that in place of their own size


class Digest(NamedTuple):
    """A linear function of a gradient, and the gradient's root mean square. Sums of digests are digests of sums."""

    values: torch.Tensor
    size: float


Digests = dict[str, Digest]


def _vector(length: int, seed: float) -> torch.Tensor:
    """Values of mean square 1 that repeat nowhere."""
    return torch.sin(torch.arange(1, length + 1, dtype=torch.float64).square() * seed).float() * 2**0.5


def _digest(gradient: torch.Tensor) -> Digest:
    values = gradient.detach().float()
    size = float(values.square().mean().sqrt()) if values.numel() else 0.0
    if values.numel() > _WHOLE and values.dim() > 1:
        rows = values.reshape(values.shape[0], -1)
        left, right = (
            _vector(length, seed).to(rows.device) for length, seed in zip(rows.shape, (0.7, 1.3), strict=True)
        )
        # Each is as large as one element of the gradient, as are those of a small one.
        values = torch.cat([rows @ right / rows.shape[1] ** 0.5, left @ rows / rows.shape[0] ** 0.5])
    return Digest(values.flatten().cpu(), size)


def fits_in_fp32(model: nn.Module) -> bool:
    """Whether the model has 16 bits, and is small enough for a copy of its parameters in fp32."""
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.dtype in _HALVES]
    return 0 < sum(sizes) <= _LARGEST_COPY


@contextmanager
def aliased(model: nn.Module, in_fp32: bool = False) -> Iterator[dict[str, nn.Parameter]]:
    """Within, the model computes with other parameters of the same values, by name: all of them are trained ones.

    The model's own keep their flags, hooks and gradients, and no graph has seen their shapes. in_fp32: those of 16 bits
    are copied, and buffers too, since gradients in 16 bits tell little of a deep model.
    """
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    names: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and type(parameter) is nn.Parameter:
            widened = parameter.detach().float() if in_fp32 and parameter.dtype in _HALVES else parameter.detach()
            names[name] = aliases[parameter] = nn.Parameter(widened)
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in aliases
    ]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if in_fp32 and buffer is not None and buffer.dtype in _HALVES
    ]
    try:
        for module, name, parameter in places:
            setattr(module, name, aliases[parameter])
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        yield names
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def gradients_of(
    outputs: list[torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    cut: Callable[[str, torch.Tensor], torch.Tensor],
) -> Digests:
    """Digests of gradients for gradients of the outputs that repeat nowhere. cut: leaves this rank's part of one.

    A gradient is dropped as soon as its digest is known.
    """
    found: Digests = {}

    def take(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            found[name] = _digest(cut(name, gradient))
            return gradient.new_zeros(()).expand_as(gradient)

        return hook

    trained = [output for output in outputs if output.requires_grad]
    hooks = [parameter.register_hook(take(name)) for name, parameter in parameters.items()]
    try:
        given = [_vector(output.numel(), 0.7).view(output.shape).to(output.device, output.dtype) for output in trained]
        if trained:
            torch.autograd.grad(trained, list(parameters.values()), given, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the check of one parameter's gradient. `off`: by how much of its size the rank's own differs."""

    name: str
    off: float
    sum_off: float  # likewise, of the sum over the ranks; of a slice the same as `off`
    is_absent: bool  # no rank has a gradient, and the whole model has


def compare_gradients(before: Digests, after: Digests, slices: Mapping[str, Slice], team: Team) -> list[Verdict]:
    """One verdict for each parameter, the same on all ranks. before: of this rank's parts of the whole model's."""
    whole = [name for name in before if name not in slices]
    own = {name: after.get(name, Digest(torch.zeros_like(digest.values), 0.0)) for name, digest in before.items()}
    sums = dict(zip(whole, _sums([own[name].values for name in whole], team), strict=True))
    sizes = _over_ranks([digest.size for digest in before.values()], team)
    least = _LEAST * max(sizes, default=0.0)
    offs, sum_offs = [], []
    for (name, digest), size in zip(before.items(), sizes, strict=True):
        scale = max(size, least) or 1.0
        offs.append(_difference(own[name].values, digest.values) / scale)
        sum_offs.append(_difference(sums[name], digest.values) / scale if name in sums else offs[-1])
    present = _over_ranks([own[name].size for name in before], team)
    worst, worst_sum = _over_ranks(offs, team), _over_ranks(sum_offs, team)
    return [
        Verdict(name, own_off, sum_off, here == 0.0 and size > least)
        for name, own_off, sum_off, here, size in zip(before, worst, worst_sum, present, sizes, strict=True)
    ]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).square().mean().sqrt()) if one.numel() else 0.0


def _sums(values: list[torch.Tensor], team: Team) -> list[torch.Tensor]:
    if not values:
        return []
    told = team.core.all_gather(torch.cat(values), "start").sum(0)
    return list(told.split([len(each) for each in values]))


def _over_ranks(values: list[float], team: Team) -> list[float]:
    """The largest of the ranks' values, for each place; one that is no number counts as infinite."""
    if not values:
        return []
    told = team.core.all_gather(torch.tensor(values, dtype=torch.float32), "start")
    largest: list[float] = told.nan_to_num(float("inf")).amax(0).tolist()
    return largest
