# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ports of 127.0.0.1 for the ranks that tests start."""

import contextlib
import itertools
import os
import socket

# Below those that Linux gives to outgoing connections, which could take a free one before a rank listens on it, and
# below Deeptide's default.
FIRST, COUNT = 20000, 9000
_next = itertools.count(os.getpid() * 101 % COUNT)


def free_ports(count):
    """Ports that nobody listens on. Test processes begin at different ones, so they seldom choose alike."""
    ports = []
    while len(ports) < count:
        port = FIRST + next(_next) % COUNT
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports
