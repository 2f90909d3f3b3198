# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows of this process's memory, in bytes."""

import re
from pathlib import Path


def _field_bytes(file, field):
    return int(re.search(rf"^{field}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)[1]) * 1024


def peak_rss():
    """The largest resident size since the last reset_peak_rss(), or since the process began (then it is ru_maxrss)."""
    return _field_bytes("/proc/self/status", "VmHWM")


def reset_peak_rss():
    Path("/proc/self/clear_refs").write_text("5")


def pss():
    """Resident bytes, each page shared with another process counted as its fraction."""
    return _field_bytes("/proc/self/smaps_rollup", "Pss")
