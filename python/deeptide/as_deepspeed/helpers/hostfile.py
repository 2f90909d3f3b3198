# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher.runner's functions of hosts and their slots, for tools that start programs themselves.

The launcher has its own, in C++; these read what DeepSpeed's read and return what DeepSpeed's return.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterable

from deeptide.as_deepspeed.helpers.logging import logger

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """{host: slots}; None where there is no such file. Errors: ValueError for another line, or a host twice."""
    if not os.path.isfile(hostfile_path):
        logger.warning("Unable to find hostfile, will proceed with training with local resources only.")
        return None
    with open(hostfile_path, encoding="utf-8") as file:
        return _parse_hostfile(file)


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    slots: OrderedDict[str, int] = OrderedDict()
    for line in map(str.strip, hostfile_lines):
        if not line or line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None:
            raise ValueError(f"hostfile: got the line {line!r}, expected 'host slots=N'")
        if found[1] in slots:
            raise ValueError(f"hostfile: {found[1]} stands there twice; give it one line with all of its slots")
        slots[found[1]] = int(found[2])
    if not slots:
        raise ValueError("hostfile: it names no host; write lines 'host slots=N'")
    return slots


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """("host", its slots) of "host:0,1"; no slots of "host"."""
    host, *slots = node_config.split(":")
    if len(slots) > 1:
        raise ValueError(f"got {node_config!r}, expected 'host' or 'host:0,1'")
    return host, [int(slot) for slot in slots[0].split(",")] if slots else []


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """{host: its slots, sorted} of "host-0:1@host-1"."""
    found: dict[str, set[int]] = {}
    for part in node_config_list.split("@"):
        host, slots = parse_node_config(part)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(
    host_info: dict[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The hosts and slots that are named, or those that are not. Errors: ValueError for both, or an unknown one."""
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive: give one")
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            raise ValueError(f"host {host!r} is not in the hostfile, which has {', '.join(host_info)}")
        unknown = [slot for slot in slots if slot not in host_info[host]]
        if unknown:
            raise ValueError(f"host {host!r} has no slot {unknown[0]}: its slots are {host_info[host]}")
    kept = OrderedDict()
    for host, slots in host_info.items():
        chosen = named[host] or slots if host in named else []
        rest = chosen if include_str else [slot for slot in slots if slot not in chosen]
        if rest:
            kept[host] = list(dict.fromkeys(rest))
    return kept


def parse_inclusion_exclusion(resource_pool: dict[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """parse_resource_filter of all slots of a hostfile."""
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: dict[str, list[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first hosts, and the first slots of each; all where a number is not above 0."""
    hosts = list(active_resources.items())[: num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus)) if num_gpus > 0 else slots) for host, slots in hosts)


def encode_world_info(world_info: dict[str, list[int]]) -> str:
    """Hosts and slots as the text that --world_info takes."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
