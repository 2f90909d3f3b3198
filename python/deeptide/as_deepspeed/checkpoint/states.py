# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's safe_set_full_* and safe_*_local_*: deeptide.utils has them, or an error says so by name."""

from __future__ import annotations

from typing import Any

import torch

from deeptide import utils
from deeptide.as_deepspeed import NotSupportedError


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the gradient that the next step uses: of each rank's value the part that it holds, as in DeepSpeed.

    Where every rank holds all of it, values must be equal. Collective. Errors: as deeptide.utils.safe_set_full_grad.
    """
    engine, name = utils.owner(param)
    held = engine._core.local_state(name, "gradient") if engine.zero_optimization_stage() > 0 else None
    if held is None or value.shape != param.shape:
        utils.safe_set_full_grad(param, value)
        return
    start, part = held
    utils.safe_set_local_grad(param, value.detach().flatten()[start : start + part.numel()].reshape(part.shape))


def __getattr__(name: str) -> Any:
    if not name.startswith("safe_"):
        raise AttributeError(name)
    found = getattr(utils, name, None)
    if found is not None:
        return found

    def absent(*args: object, **kwargs: object) -> None:
        raise NotSupportedError(
            f"deepspeed.utils.{name} is not here yet; write into the parameter under torch.no_grad()"
        )

    return absent
