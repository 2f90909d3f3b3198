# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers that the program draws outside of the blocks: each stage would draw others."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deeptide._process import generators
from deeptide.pipeline.passing.elsewhere import ElsewhereError, elsewhere_in


class NoDraws(TorchDispatchMode):
    """Refuses numbers of torch's generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._is_open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if may_draw(func, args, kwargs) and next(elsewhere_in((args, kwargs)), None) is None:
            raise ElsewhereError(
                f"{func} draws random numbers before this stage's blocks, and each stage would draw others; draw them "
                "in a block, or give them with the batch"
            )
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """Looks at the operators of this thread until `end`."""
        self._is_open = True
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def end(self) -> None:
        """May be called again."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]


_known: dict[Any, bool] = {}  # by operator; to ask for its tags takes as long as a small one


def may_draw(func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a call of an operator draws from torch's generators. An attention without dropout has the tag, too."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = torch.Tag.nondeterministic_seeded in func.tags
    return found and not _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def mark() -> int:
    """A number for the states of Python's generator and NumPy's: another one after a draw."""
    return zlib.crc32(generators.of_interpreter())
