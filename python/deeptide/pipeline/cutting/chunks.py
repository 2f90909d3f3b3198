# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks on each stage and the blocks they begin with, as the configuration asks for them."""

from __future__ import annotations

import json

from deeptide import _C
from deeptide._C import Config, ConfigError

BY_OPERATOR = ["by_operator"]
_DEFAULT = 2  # of the interleaved schedule


def chunks_of(config: Config) -> int:
    """The number of each stage's chunks. Errors: ConfigError if the schedule has none."""
    section = json.loads(_C.config_section(config, "parallel"))
    chunks: int | None = section["chunks"]
    if section["schedule"] == "interleaved":
        return chunks or _DEFAULT
    if chunks is not None and chunks > 1:
        raise ConfigError(
            f'parallel.chunks is {chunks}, and parallel.schedule is "{section["schedule"]}", which has one chunk on '
            'each stage: give "schedule": "interleaved"'
        )
    return 1


def starts_of(config: Config) -> list[str] | None:
    """Names of the blocks with which the parts after the first begin, or BY_OPERATOR; None: by parameters."""
    cut: str | list[str] = json.loads(_C.config_section(config, "parallel"))["pipeline"]["cut"]
    names = [cut] if isinstance(cut, str) else cut
    return None if names == ["by_block"] else names
