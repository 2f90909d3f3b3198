# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Norms, overflow checks and partitions of deepspeed.runtime.utils, over plain tensors and whole gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deeptide import _C, utils
from deeptide.as_deepspeed import NotSupportedError


def _gradients(parameters: torch.Tensor | Iterable[torch.Tensor], mpu: object) -> list[torch.Tensor]:
    """The parameters that have a gradient. Errors: NotSupportedError where the engine has taken the gradients."""
    if mpu is not None:
        raise NotSupportedError(
            "mpu: norms here are of this rank's tensors alone; leave it out, and for the norm of layers that ranks "
            'share write "gradient_clipping" or call engine.get_global_grad_norm()'
        )
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_gradient = [p for p in parameters if p.grad is not None]
    if parameters and not with_gradient and any(p in utils._owners for p in parameters):
        raise NotSupportedError(
            'the engine holds the gradients, sharded, and .grad is None: write "gradient_clipping" into the '
            'configuration, call engine.get_global_grad_norm() after step(), or set "deeptide": {"keep_grad": true}'
        )
    return with_gradient


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: object = None
) -> torch.Tensor:
    """Scales `.grad` of parameters in place to a norm of at most `max_norm`; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(_gradients(parameters, mpu), float(max_norm), float(norm_type))


def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: object = None
) -> torch.Tensor:
    """The norm of all `.grad` together."""
    return _total([p.grad for p in _gradients(parameters, mpu) if p.grad is not None], norm_type)


def get_weight_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2, mpu: object = None
) -> torch.Tensor:
    """The norm of the parameters themselves."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return _total([p.detach() for p in parameters], norm_type)


def _total(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor.float(), float(norm_type)) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), float(norm_type)) if norms else torch.tensor(0.0)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The 2-norm of several parts from their 2-norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: object = None, moe_ep_group: object = None
) -> torch.Tensor:
    """The norm of all tensors together, as a float32 tensor of shape (); -1 where it is not finite."""
    if mpu is not None or moe_ep_group is not None:
        raise NotSupportedError("mpu, moe_ep_group: norms here are of this rank's tensors alone; leave them out")
    total = _total(list(input_tensors), norm_type)
    return torch.where(torch.isfinite(total), total, total.new_tensor(-1.0))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: object = None,
    eps: float = 1e-6,
) -> Any:
    """Scales tensors in place to a norm of at most `max_norm`; returns the norm before, or the one that was given."""
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors, mpu=mpu)
    factor = max_norm / (global_norm + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return global_norm


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Whether an element is not finite, as a tensor of shape ()."""
    return ~torch.isfinite(x.float()).all()


class CheckOverflow:
    """Whether a gradient of any rank is not finite; the engine's own step checks by itself."""

    def __init__(
        self,
        param_groups: Iterable[Iterable[torch.Tensor]] | None = None,
        mpu: object = None,
        zero_reduce_scatter: bool = False,
        deepspeed: object = None,
    ) -> None:
        self.mpu = mpu
        self.params = None if param_groups is None else list(itertools.chain.from_iterable(param_groups))

    def check(self, param_groups: Iterable[Iterable[torch.Tensor]] | None = None) -> bool:
        """Whether the parameters given here, or to the constructor, overflow. Collective."""
        if param_groups is not None:
            return self.has_overflow(list(itertools.chain.from_iterable(param_groups)))
        if self.params is None:
            raise ValueError("CheckOverflow.check(): no parameters were given, here or to the constructor")
        return self.has_overflow(self.params)

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether this rank's do."""
        return any(bool(has_inf_or_nan(p.grad)) for p in _gradients(params, self.mpu) if p.grad is not None)

    def has_overflow(self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether any rank's do. Collective."""
        return _any_rank(self.has_overflow_serial(params))

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Whether a norm is -1, DeepSpeed's sign of an overflow, or not finite. Collective if `reduce_overflow`."""
        bad = any(float(norm) == -1 or not math.isfinite(float(norm)) for norm in norm_group)
        return _any_rank(bad) if reduce_overflow else bad

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor, i: object = None) -> bool:
        return bool(has_inf_or_nan(x))


def _any_rank(here: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    flag = torch.tensor([int(here)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def prefix_sum_inc(weights: Sequence[float]) -> list[Any]:
    """Sums up to each element, itself included."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """num_parts + 1 bounds: parts of nearly equal numbers of items, the larger ones first."""
    return _C.uniform_bounds(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """num_parts + 1 bounds of consecutive parts of nearly equal sums, where DeepSpeed cuts."""
    return _C.balanced_bounds([float(weight) for weight in weights], num_parts)


class DummyOptim:
    """Stands for no optimizer at stage 3: it holds groups only."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": params}]
