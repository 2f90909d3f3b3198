# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Raises, on all stages of a pipeline, an error that one of them met in a forward: a program may catch it on all."""

from __future__ import annotations

import sys
from functools import reduce

from deeptide._C import CommError
from deeptide.pipeline.errors import PipelineError

_LONGEST = 2000  # characters of a text that travels


def is_shared(error: Exception) -> bool:
    """Whether all stages hear of an error by a message. After a lost peer there are none."""
    return not isinstance(error, CommError)


def packed(error: Exception, rank: int) -> list[str | int]:
    """The message to the other stages."""
    kind = type(error)
    return [kind.__module__, kind.__qualname__, rank, str(error)[:_LONGEST]]


def unpacked(stage: int, num_stages: int, message: list[str | int]) -> Exception:
    """An error of the same class, if this process has it, so that `except` catches it on all stages."""
    module, name, rank, text = message
    text = (
        f"rank {rank}, stage {stage} of {num_stages}, raised {name} in its part of the forward: {text}\n"
        "The forward counts on no stage. A program that catches this and goes on does so on all stages"
    )
    kind = reduce(lambda found, part: getattr(found, part, None), str(name).split("."), sys.modules.get(str(module)))
    try:
        error = kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else PipelineError(text)
    except Exception:  # its constructor takes other arguments
        return PipelineError(text)
    return error if str(rank) in str(error) else PipelineError(text)
