# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Hosts for benchmarks: network namespaces on one switch, each with a link of a given rate. Needs root."""

import contextlib
import os
import subprocess


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _limit(namespace, device, rate):
    bucket = ("rate", rate, "burst", "256kb", "latency", "50ms")
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket], check=True)


def address_of(host):
    return f"10.99.0.{host + 1}"


@contextlib.contextmanager
def slow_hosts(rate, count=2, last_rate=None):
    """Yields the names of `count` namespaces; each sends and receives at most at `rate`, in tc's words.

    `last_rate`: the last one's, if it differs.
    """
    switch = f"deeptide-{os.getpid()}-switch"
    names = [f"deeptide-{os.getpid()}-{host}" for host in range(count)]
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for host, name in enumerate(names):
            port = f"port{host}"
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address_of(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            own_rate = last_rate if last_rate and host == count - 1 else rate
            _limit(name, "eth0", own_rate)
            _limit(switch, port, own_rate)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
