# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's safe_set_full_* and safe_*_local_*: deeptide.utils has them, or an error says so by name."""

from __future__ import annotations

from typing import Any

from deeptide import utils
from deeptide.as_deepspeed import NotSupportedError


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
