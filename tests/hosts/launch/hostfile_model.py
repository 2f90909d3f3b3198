# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The hostfile and its filters once more, plainly: what the launcher is compared with."""

import re


class Refused(Exception):  # noqa: N818  an outcome of the model, not a failure
    """A user's mistake; `line` is the hostfile's, if it is one of its lines."""

    def __init__(self, line=None):
        self.line = line


def parse_hostfile(text):
    hosts = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        words = line.split("#")[0].split()
        match = len(words) >= 2 and re.fullmatch(r"slots=(\d{1,9})", words[1])
        rest = all(re.fullmatch(r"max[-_]slots=\d+", word) for word in words[2:])
        name = words and re.fullmatch(r"[A-Za-z0-9_.:%@\[\]][-A-Za-z0-9_.:%@\[\]]*", words[0])
        if not match or not name or not rest or not 1 <= int(match[1]) <= 4096 or words[0] in hosts:
            raise Refused(number)
        hosts[words[0]] = list(range(int(match[1])))
    if not hosts:
        raise Refused
    return hosts


def numbers(text):
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise Refused
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def named(hosts, text):
    chosen = {}
    for spec in text.split("@"):
        name, colon, slots = spec.partition(":")
        if name not in hosts:
            raise Refused
        wanted = numbers(slots) if colon else set(hosts[name])
        if not wanted <= set(hosts[name]):
            raise Refused
        chosen.setdefault(name, set()).update(wanted)
    return chosen


def filter_hosts(hosts, include="", exclude="", num_nodes=None, num_gpus=None):
    if (include and exclude) or ((include or exclude) and (num_nodes or num_gpus)):
        raise Refused
    left = dict(hosts)
    if include:
        chosen = named(hosts, include)
        left = {name: sorted(chosen.get(name, ())) for name in hosts}
    if exclude:
        chosen = named(hosts, exclude)
        left = {name: [slot for slot in slots if slot not in chosen.get(name, ())] for name, slots in hosts.items()}
    if num_nodes:
        if num_nodes > len(hosts):
            raise Refused
        left = dict(list(left.items())[:num_nodes])
    if num_gpus:
        if any(num_gpus > len(slots) for slots in left.values()):
            raise Refused
        left = {name: slots[:num_gpus] for name, slots in left.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise Refused
    return left
