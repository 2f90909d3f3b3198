# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that a program asks for, as hidden states of all blocks or attention's weights: they leave the model whole.

Who makes a part notes it. Modules around the blocks look at what they return, and join the parts among that; a part's
gradient is this rank's part of the whole's. A forward that returns none exchanges nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from deeptide.pipeline.passing.elsewhere import Elsewhere
from deeptide.pipeline.passing.letters import is_as_received
from deeptide.pipeline.passing.skips import mapped
from deeptide.tensor.sequence import joined_sequence
from deeptide.tensor.team import Team

_HEADS = 1  # the dimension of (batch, heads, queries, keys)

_joins = WeakTensorKeyDictionary()  # by a part, what makes it whole


def note_part(part: Any, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Lets a tensor leave the model as join(part). Another stage's tensor has no values to join."""
    if isinstance(part, torch.Tensor) and not isinstance(part, Elsewhere):
        _joins[part] = join


def note_heads(output: Any, team: Team) -> Any:
    """Notes the weights beside attention's output, which are of this rank's heads. Returns the output."""
    if type(output) in (tuple, list):
        for part in output[1:]:
            if isinstance(part, torch.Tensor) and part.dim() == 4:
                note_part(part, functools.partial(joined_sequence, team=team, dim=_HEADS))
    return output


def join_outputs_around(model: nn.Module, path: str, chain: Any = None) -> None:
    """Lets parts leave the modules that have the one of this path within them. chain: the blocks' Positions."""
    modules = dict(model.named_modules(remove_duplicate=False))
    while path:
        path = path.rpartition(".")[0]
        module: Any = modules[path]
        if _join_outputs not in module._forward_hooks.values():
            module.register_forward_hook(_join_outputs)
        if chain is not None:
            module.tensor_chains = (*module.__dict__.get("tensor_chains", ()), chain)


def _join_outputs(module: nn.Module, _: Any, output: Any) -> Any:
    def whole(label: str, tensor: torch.Tensor) -> torch.Tensor:
        join = _joins.get(tensor) or _join_by_shape(module, label, tensor)
        return tensor if join is None else cast("torch.Tensor", join(tensor))

    return mapped(output, "", whole)


def _join_by_shape(module: nn.Module, label: str, tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """The join for a part that another stage has sent. Errors: ValueError by name for other parts."""
    key = next((word for word in reversed(label.split(".")) if not word.isdigit()), "")
    is_states, is_weights = key.endswith("hidden_states"), key.endswith("attentions") and tensor.dim() == 4
    if isinstance(tensor, Elsewhere) or not (is_states or is_weights):
        return None
    is_staged = any("_deeptide_block" in each.__dict__ for each in module.modules())
    chains = module.__dict__.get("tensor_chains", ())
    if is_states and (len(chains) != 1 or not chains[0].may_be_part(tensor)):
        return None
    if is_states and is_staged and is_as_received(tensor):
        return cast("Callable[[torch.Tensor], Any]", chains[0].end)
    if is_weights and not is_staged:
        return None
    why = "another stage has computed it" if is_weights else "it is computed between blocks of what they return"
    raise ValueError(
        f"{key} of {type(module).__name__}: {tuple(tensor.shape)} is of one of the ranks that share layers, and cannot "
        f"be joined, since {why}; leave parallel.{'pipeline' if is_weights else 'sequence_parallel_norms'} out, or do "
        f"not ask for {key}"
    )
