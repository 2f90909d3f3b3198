# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells the other ranks of an error that a method of the engine raises on this one: they may be waiting for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from deeptide._C import CommError, SaveMeetsStepError
from deeptide._process.preemption import Preempted

if TYPE_CHECKING:
    from deeptide.engine import Engine

_Method = TypeVar("_Method", bound=Callable[..., Any])


def told(method: _Method) -> _Method:
    """A method of the engine that reports what it raises; the report stands until the program calls the next one."""

    @functools.wraps(method)
    def call(engine: Engine, /, *args: Any, **kwargs: Any) -> Any:
        if engine._has_told:
            engine._has_told = False
            with contextlib.suppress(Exception):  # the engine may have been destroyed
                engine._core.withdraw_error()
        try:
            return method(engine, *args, **kwargs)
        except Preempted:
            raise
        except BaseException as error:
            engine._has_lost_peers |= isinstance(error, CommError) and not isinstance(error, SaveMeetsStepError)
            with contextlib.suppress(Exception):
                engine._has_told = True
                engine._core.report_error(f"raised {type(error).__name__} in {method.__name__}", str(error))
            raise

    return cast("_Method", call)
