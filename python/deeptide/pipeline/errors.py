# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of pipelines."""

from __future__ import annotations

from typing import Any, NoReturn


class PipelineError(RuntimeError):
    """A method of an engine that a stage of a pipeline does not have, or a model that cannot be cut into stages."""


class NotCopied:
    """A part of a cut model that no copy can have: copies would run on this stage and call the others."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Errors: PipelineError, in place of what one of its attributes would raise."""
        raise PipelineError(
            "a model that is cut into stages was copied (copy.deepcopy, AveragedModel): a stage has a part of it. "
            "engine.snapshot(), called on all ranks, copies the whole model on every rank; average that"
        )
