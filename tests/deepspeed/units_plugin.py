# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for DeepSpeed's own unit tests: ranks start from a server that has imported all, and none hangs."""

import multiprocessing
import os

MOST = int(os.environ.get("MOST") or 0)  # of one function's parameters; 0: all


def pytest_configure(config):
    """The server forks each rank: imports are made once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "deepspeed", "unit.common", "unit.simple_model", "units_ranks"]
    )


def pytest_collection_modifyitems(config, items):
    """Keeps at most MOST cases of a function, evenly spread."""
    if MOST < 2:
        return
    groups = {}
    for item in items:
        groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = set()
    for group in groups.values():
        last = len(group) - 1
        kept.update(group[round(place * last / (MOST - 1))] for place in range(MOST))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
