# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's blocks, and has their forwards pass through ours."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch

from deeptide._C import ConfigError
from deeptide.activations.again import Block

_OURS = "_deeptide_activations"  # of a block's module


def blocks_of(model: torch.nn.Module, policy: str) -> dict[str, torch.nn.Module]:
    """A model's numbered blocks by their paths; in a pipeline, this stage's. Errors: ConfigError if it has none."""
    cut = model.__dict__.get("_deeptide_cut")
    if cut is not None:
        return dict(cut.own_blocks)
    from deeptide.pipeline.cutting.blocks import numbered_blocks

    found = numbered_blocks(model)
    if not found:
        raise ConfigError(
            f'activation_checkpointing.policy is "{policy}", and {type(model).__name__} has no ModuleList or '
            "Sequential of two blocks or more; leave the key out, and call torch.utils.checkpoint in the model"
        )
    return found


def check_reach(blocks: Iterable[Block]) -> None:
    """Errors: ConfigError where a module has a forward of its own, past its class."""
    for block in blocks:
        own = block.module.__dict__.get("forward")
        if own is not None and not _is_of_class(own, block.module):
            raise ConfigError(
                f"activation_checkpointing.policy: {block.name}.forward was replaced on the module itself, so the "
                "policy cannot reach it; replace the method of its class, or leave the policy out"
            )


def _is_of_class(forward: object, module: torch.nn.Module) -> bool:
    """Whether it is the class's, as a wrapper leaves it on a module that it has put back."""
    return getattr(forward, "__func__", None) is type(module).forward


def take_over(blocks: Iterable[Block]) -> None:
    """Makes each call of a block's forward ours. Their classes are derived from what they were, as a pipeline's."""
    kinds: dict[type, type] = {}
    for block in blocks:
        module = block.module
        give_back(module)  # of an engine before
        if "forward" in module.__dict__:  # the class's
            del module.__dict__["forward"]
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _derived(kind)
        module.__class__ = block.taken = kinds[kind]
        module.__dict__[_OURS] = block


def give_back(module: torch.nn.Module, block: Block | None = None) -> None:
    """Undoes it; with `block` given, unless another engine has taken the module over since.

    A class that was derived from ours since, as random-LTD's, stays, and ours has no effect below it.
    """
    holder = module.__dict__.get(_OURS)
    if holder is None or (block is not None and holder is not block):
        return
    kind = vars(type(module)).get("_deeptide_kind")
    if kind is not None:
        module.__class__ = kind
    del module.__dict__[_OURS]


def _plain(kind: Any) -> Any:
    return kind.__new__(kind)


def _derived(kind: type) -> type:
    original = cast("Any", kind).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        block: Block | None = self.__dict__.get(_OURS)
        if block is None or block.taken is not derived or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return block.run(functools.partial(original, self), args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """A copy is of the plain class: what is copied or pickled belongs to no engine."""
        made, args, state, *rest = super(derived, self).__reduce_ex__(protocol)
        if args and args[0] is type(self):  # else a class below, as random-LTD's, has named the plain one
            made, args = _plain, (kind,)
        return made, args, {name: value for name, value in state.items() if name != _OURS}, *rest

    names = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_deeptide_kind": kind,
    }
    derived: Any = type(kind.__name__, (kind,), names)
    return cast("type", derived)
