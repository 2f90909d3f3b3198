# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A copy of the model that training does not touch."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from deeptide._C import CommError


def copy_of(model: torch.nn.Module, left_out: Iterable[object] = ()) -> torch.nn.Module:
    """A deep copy with whole parameters in memory of its own: in eval mode, without gradients. Collective at stage 3.

    left_out: objects in whose place the copy has None.
    Errors: what copy.deepcopy raises for an attribute that cannot be copied, with what to do.
    """
    # torch copies no result of an operator; modules keep such (attention weights, an auxiliary loss) from a forward.
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    memo |= {id(each): None for each in left_out}
    try:
        with torch.no_grad():
            twin = copy.deepcopy(model, memo)
    except CommError:
        raise
    except (RuntimeError, TypeError) as error:
        error.args = (
            f"{error}\nengine.snapshot() deep-copies {type(model).__name__}: an attribute of a module cannot be "
            "copied. Keep it outside the model, or give its class a __deepcopy__",
        )
        raise
    return twin.requires_grad_(False).eval()
