# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's logger, and its functions that speak on some ranks only."""

from __future__ import annotations

import functools
import logging as _logging
import os
import sys
from collections.abc import Sequence

logger = _logging.getLogger("DeepSpeed")
if not logger.handlers:
    _handler = _logging.StreamHandler(stream=sys.stderr)
    _handler.setFormatter(_logging.Formatter("[deeptide] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
    logger.setLevel(_logging.INFO)

_LEVELS = {
    "debug": _logging.DEBUG,
    "info": _logging.INFO,
    "warning": _logging.WARNING,
    "error": _logging.ERROR,
    "critical": _logging.CRITICAL,
}


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = _logging.INFO) -> None:
    """Logs on the ranks given, or on all with None or [-1]."""
    if not ranks or -1 in ranks or _rank() in ranks:
        logger.log(level, f"[Rank {_rank()}] {message}")


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = _logging.INFO) -> None:
    """Logs each message once."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(message: str) -> None:
    """Warns of each message once."""
    logger.warning(message)


def print_rank_0(message: object) -> None:
    """Prints on rank 0."""
    if _rank() == 0:
        print(message, flush=True)


def set_log_level_from_string(log_level_str: str, custom_logger: _logging.Logger | None = None) -> None:
    """debug, info, warning, error or critical."""
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"{log_level_str} is not one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(_LEVELS[log_level_str.lower()])


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most this."""
    return logger.getEffectiveLevel() <= _LEVELS[max_log_level_str.lower()]
