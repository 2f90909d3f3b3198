# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for DeepSpeed's own unit tests: ranks start from a server that has imported all, and none hangs."""

import multiprocessing
import os

import pytest

MOST = int(os.environ.get("MOST") or 0)  # of one function's parameters; 0: all
IMPORTS = "torch numpy.random deepspeed deeptide.as_deepspeed.initialize unit.common unit.simple_model unit.util"


def pytest_configure(config):
    """The server forks each rank: imports are made once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTS.split(), "units_ranks"])


def pytest_sessionstart(session):
    """A test whose ranks do not end fails alone: the file's own way waits for them for ever, and ends pytest."""
    import torch.multiprocessing
    from unit import common

    def launch(self, num_procs, init_method):
        pool = torch.multiprocessing.Pool(processes=num_procs)
        port = common.get_master_port()
        try:
            each = [(rank, num_procs, port, init_method) for rank in range(num_procs)]
            skipped = pool.starmap_async(self._dist_run, each).get(self.exec_timeout)
            pool.starmap_async(self._dist_destroy, [()] * num_procs).get(self.exec_timeout)
        except multiprocessing.TimeoutError:
            pytest.fail(f"its ranks did not end in {self.exec_timeout} s")
        finally:
            pool.terminate()
            pool.join()
        if any(skipped):
            pytest.skip(skipped[0])

    common.DistributedExec._launch_daemonic_procs = launch


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
