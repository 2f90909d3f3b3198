# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine and the software that a reader needs to judge the figures."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path


def _first(pattern, file):
    found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    return found[1].strip() if found else "unknown"


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit():
    folder = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def describe():
    cpu = _first(r"^model name\s*:(.*)$", "/proc/cpuinfo")
    kilobytes = int(_first(r"^MemTotal:\s+(\d+) kB", "/proc/meminfo"))
    return {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{kilobytes / 2**20:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "Python": platform.python_version(),
        "torch": _version("torch"),
        "DeepSpeed": _version("deepspeed"),
        "Deeptide": f"commit {_commit()}",
        "load average before": f"{os.getloadavg()[0]:.2f} (a quiet machine's is near 0)",
    }
