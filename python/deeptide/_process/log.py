# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells the user what the front has to say: through the logger "deeptide", and warnings through `warnings` too."""

import logging
import os
import sys
import warnings
from pathlib import Path

_LEVELS = ("debug", "info", "warning", "error")
_PACKAGE = str(Path(__file__).parents[1])
_shown = {"deeptide_is_shown": True}  # marks a record that `warnings` has printed


class DeeptideWarning(UserWarning):
    """The category of the front's warnings."""


class _Line(logging.Handler):
    """Writes "[deeptide] text" to standard error, in the core's manner, where no root handler writes to a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "deeptide_is_shown") and not _root_shows():
            print(f"[deeptide] {record.getMessage()}", file=sys.stderr, flush=True)


def _root_shows() -> bool:
    streams = (getattr(handler, "stream", None) for handler in logging.getLogger().handlers)
    return any(stream in (sys.stderr, sys.stdout) for stream in streams)


_logger = logging.getLogger("deeptide")
_logger.addHandler(_Line())
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.DEBUG)  # DEEPTIDE_LOG_LEVEL decides, as it does for the core


def _depth_of_caller() -> int:
    """How many frames lie between `say` and the program's own code."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth


def say(text: str, level: str = "info") -> None:
    """Logs one line unless DEEPTIDE_LOG_LEVEL asks for less; a warning is a DeeptideWarning at the caller's line."""
    threshold = os.environ.get("DEEPTIDE_LOG_LEVEL", "info")
    if threshold in _LEVELS and _LEVELS.index(level) < _LEVELS.index(threshold):
        return
    if level == "warning":
        warnings.warn(text, DeeptideWarning, stacklevel=_depth_of_caller())
        _logger.warning(text, extra=_shown)
    else:
        _logger.log(logging.getLevelName(level.upper()), text)
