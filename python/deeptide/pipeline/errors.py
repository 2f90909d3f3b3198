# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn


class PipelineError(RuntimeError):
    """A method of an engine that a stage of a pipeline does not have, or a model that cannot be cut into stages."""


_is_whole: ContextVar[bool] = ContextVar("a copy gets what this stage lacks", default=False)


@contextlib.contextmanager
def copied_whole() -> Iterator[None]:
    """Inside, a copy of a cut model is allowed: it is completed with what the other stages have."""
    token = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(token)


def reduce(self: Any, protocol: Any) -> Any:
    """`__reduce_ex__` of a cut model and its blocks. Errors: PipelineError for a copy or a pickle of a stage's part."""
    if not _is_whole.get():
        raise PipelineError(_COPIED)
    return object.__reduce_ex__(self, protocol)


class NotCopied:
    """A part of a cut model that no copy can have: copies would run on this stage and call the others."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Errors: PipelineError, in place of what one of its attributes would raise."""
        raise PipelineError(_COPIED)


_COPIED = (
    "a model that is cut into stages was copied or pickled (copy.deepcopy, AveragedModel, torch.save(model)): a stage "
    "has a part of it. engine.snapshot(), called on all ranks, copies the whole model on every rank; average or save "
    "that"
)
