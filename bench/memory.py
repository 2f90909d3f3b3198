# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, and of a whole job from outside, by the kernel's count, in bytes."""

import contextlib
import os
import re
import stat
import time
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


def _resident(pid):
    """(anonymous, of files) of one process."""
    fields = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return int(fields["RssAnon"]) * 1024, int(fields["RssFile"]) * 1024


def _shared_files(pid):
    """{identity: bytes taken} of the memory files that a process holds open: memfd, /dev/shm."""
    files = {}
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(descriptor.path).startswith(("/memfd:", "/dev/shm/")):
                status = os.stat(descriptor.path)
                if stat.S_ISREG(status.st_mode):
                    files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return files


class JobMemory:
    """Watches what the processes of a job take together; a page that several of them share is counted once.

    Anonymous pages are each process's own, and summed. Libraries are the same files in all ranks: the largest count.
    Shared memory is counted where it lies, in its files: the ranks' own counters would count a page once for each rank
    that has touched it, and again for each mapping.
    """

    def __init__(self):
        self._samples = []

    def sample(self, pids):
        """Takes about 0.2 ms. Processes that have ended count nothing."""
        anonymous, of_files, shared = 0, 0, {}
        for pid in pids:
            with contextlib.suppress(OSError, KeyError):
                own, files = _resident(pid)
                anonymous += own
                of_files = max(of_files, files)
                shared.update(_shared_files(pid))
        self._samples.append((time.monotonic(), anonymous + of_files + sum(shared.values())))

    def peak(self, begin, end):
        """The largest sum seen between two times of time.monotonic(); 0 when nothing was seen."""
        return max((total for at, total in self._samples if begin <= at <= end), default=0)
