# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What the front says to the user, in the core's manner: to standard error, quiet on request."""

import os
import sys

_LEVELS = ("debug", "info", "warning", "error")


def say(text: str, level: str = "info") -> None:
    """Writes one line unless DEEPTIDE_LOG_LEVEL asks for less."""
    threshold = os.environ.get("DEEPTIDE_LOG_LEVEL", "info")
    if threshold in _LEVELS and _LEVELS.index(level) < _LEVELS.index(threshold):
        return
    print(f"[deeptide] {text}", file=sys.stderr, flush=True)
