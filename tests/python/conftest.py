# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: as threads of this process (`run_ranks`), or as real processes (`run_processes`)."""

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import zlib
from datetime import timedelta
from pathlib import Path

# Before torch is imported, here and in all children: where it finds a GPU, models move there, `pin_memory` is CUDA's,
# and two ranks would share one device over NCCL.
if os.environ.get("DEEPTIDE_TEST_ACCELERATOR", "sim") == "sim":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
import torch.distributed as dist
from ports import free_ports
from printed import own_output
from zygote import Zygote

import deeptide

# Gloo's threads spin for a lock: one that wakes must not push aside the thread that holds it, or it spins until its
# turn is over; with more ranks than cores most of the time went there. Batch threads wait. Children inherit this.
with contextlib.suppress(OSError):  # some containers know one policy only: the tests then take longer
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# This folder and its rooms: tests use each other's models across them, and so do the ranks that they start.
FOLDERS = [
    str(path)
    for path in (Path(__file__).parent, *sorted(Path(__file__).parent.rglob("*")))
    if path.is_dir() and path.name != "__pycache__"
]
sys.path[1:1] = FOLDERS

# Loaded once, here: ranks as threads would all be waiting for the first of them to import it.
_make_world = deeptide.make_world


def _check_text(text):
    """No error that a test meets, expected or printed, is one for developers."""
    assert "INTERNAL ASSERT" not in text and "a fault in deeptide" not in text, text


def _check_expected_errors():
    kind = type(pytest.raises(KeyError))
    leave = kind.__exit__

    def checked(self, exc_type, exc, traceback):
        _check_text(str(exc))
        return leave(self, exc_type, exc, traceback)

    kind.__exit__ = checked


_check_expected_errors()


_TURN = pytest.StashKey()  # of a case that has turns


def _combinations(item, thorough):
    """Chooses from a test's grid: each value of its parameters, or each two values together.

    All tests of a grid of which nothing is to be left out show nothing.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    values = sorted((name, repr(value)) for name, value in params.items())  # the same object in all its cases
    if not thorough:
        return set(itertools.combinations(values, 1)) if len(values) > 1 else set()
    return set(itertools.combinations(values, 2)) if len(values) > 2 and item.get_closest_marker("costly") else set()


def _cover(grid, thorough):
    """Few tests of a grid that show all its combinations: again and again the one that shows most of those left.

    Of a costly grid the first two, unless `thorough`.
    """
    left = {item: _combinations(item, thorough) for item in grid}
    if not all(left.values()):
        return grid
    kept = []
    most = 2 if not thorough and grid[0].get_closest_marker("costly") else len(grid)
    while any(left.values()) and len(kept) < most:
        kept.append(max(left, key=lambda item: len(left[item])))
        shown = left[kept[-1]]
        left = {item: combinations - shown for item, combinations in left.items()}
    return kept


def _grid(item):
    return item.nodeid.split("[")[0]


def _kept(items, thorough):
    grids = {}
    for item in items:
        if thorough or not item.get_closest_marker("slow"):
            grids.setdefault(_grid(item), []).append(item)
    return {item for grid in grids.values() for item in _cover(grid, thorough)}


class _Turn:
    """The cases of a turn beyond those of every run: a third of them, and all of files that are to run whole.

    They come last in each process: those of whole files in turns with the others, which each turn puts into another
    order, so that what a slow machine has no time for is another part each time. Of costly cases that every run would
    have, a third runs, as a part of every run; the others of whole files come last as well. A run that is not thorough
    takes a sixth of costly cases and a third of other grids.
    """

    _begun = None  # when the first of them did, here

    def __init__(self, number, whole, seconds, level):
        self._number, self._whole, self._seconds, self._level = number, whole, seconds, level

    def arranged(self, items, usual, thorough):
        """This turn's of the items that run usually, and of those that run when thorough, in the order they run in."""
        cases = collections.Counter(_grid(item) for item in usual)
        always = {item for item in usual if self._is_due(item, self._turns(item, cases[_grid(item)]))}
        whole = {item for item in usual | thorough if self._is_whole(item)}
        due = [item for item in items if item not in always and (item in whole or self._adds(item, usual, thorough))]
        for item in due:
            item.stash[_TURN] = self
        others = sorted((item for item in due if item not in whole), key=self._order)
        return _dealt([item for item in items if item in always], [item for item in due if item in whole], others)

    def has_time(self):
        self._begun = self._begun or time.monotonic()
        return time.monotonic() - self._begun <= self._seconds

    def _adds(self, item, usual, thorough):
        return item in thorough and item not in usual and self._is_due(item)

    def _turns(self, item, cases):
        """After how many turns a usual case runs again, whose grid has so many of them."""
        if self._level == "1":
            return 3 if item.get_closest_marker("costly") else 1
        return 6 if item.get_closest_marker("costly") else 3 if cases > 1 else 1

    def _is_due(self, item, turns=3):
        return zlib.crc32(item.nodeid.encode()) % turns == self._number % turns

    def _is_whole(self, item):
        return self._path(item).startswith(self._whole)

    def _order(self, item):
        return zlib.crc32(f"{self._number} {self._path(item)}".encode())

    @staticmethod
    def _path(item):
        return item.path.relative_to(item.config.rootpath).as_posix()


def _dealt(always, whole, others):
    """Orders tests so that each process, which begins with as many neighbours as every other, has its share of each."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = -(-len(always) // processes)
    dealt = []
    for i in range(processes):
        pairs = itertools.zip_longest(whole[i::processes], others[i::processes])
        dealt += always[i * share : (i + 1) * share]
        dealt += [item for pair in pairs for item in pair if item is not None]
    return dealt


def pytest_collection_modifyitems(config, items):
    """Leaves out slow tests and most cases of large grids.

    THOROUGH=1: most cases of those grids alone that are large and costly. THOROUGH=2, or a test named by itself: none.
    TURN=n: of the costly cases that would run, the (n mod 6)th sixth, of other grids the (n mod 3)rd third, and the
    files and folders in CHANGED whole. With THOROUGH=1, that third of the costly cases and of what THOROUGH=0 leaves
    out, and the other grids whole.
    TURN_SECONDS with TURN: none of these begins later than that after the first; they are skipped, and so counted.
    """
    level = os.environ.get("THOROUGH", "0")
    if level == "2" or any("::" in argument for argument in config.args):
        return
    kept = _kept(items, thorough=level == "1")
    chosen = [item for item in items if item in kept]
    if "TURN" in os.environ:
        changed, seconds = os.environ.get("CHANGED", "").split(), os.environ.get("TURN_SECONDS", "inf")
        turn = _Turn(int(os.environ["TURN"]), tuple(changed), float(seconds), level)
        chosen = turn.arranged(items, _kept(items, thorough=False), kept)
    left_out = set(items).difference(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = chosen


def pytest_runtest_setup(item):
    """Skips a case of this turn for which no time is left."""
    if _TURN in item.stash and not item.stash[_TURN].has_time():
        pytest.skip("no time left for this turn's cases")


def pytest_collection_finish():
    """Freezes what is loaded by now: collections of the cyclic garbage need not walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mount_disk(tmp_path):
    """A function that mounts a disk of a size such as "8m" and returns its folder."""
    mounted = []

    def mount(size):
        if os.geteuid() != 0:
            pytest.skip("mounting a small tmpfs needs root")
        folder = tmp_path / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip("a tmpfs cannot be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def _stacks(threads):
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if thread.is_alive() and thread.ident in frames:
            yield f"rank {rank} is still at:\n" + "".join(traceback.format_stack(frames[thread.ident]))


def run_ranks(world_size, function, *args, timeout=120):
    """Calls function(world, *args) in one thread per rank; returns the results by rank.

    A rank's exception is raised again with its number; when ranks hang, the test fails with their stacks.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    results, errors = [None] * world_size, {}

    def run(rank):
        torch.set_num_threads(1)  # OpenMP keeps this number for each thread; sums depend on it
        try:
            results[rank] = function(_make_world(store, rank, world_size), *args)
        except BaseException as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = list(_stacks(threads))
    if errors:
        # The first to fail is the cause, and the others fail because it is gone: one of them may be noted before it.
        first = sorted(errors.items(), key=lambda item: isinstance(item[1], deeptide.CommError))
        rank, error = first[0]
        error.__notes__ = [
            *getattr(error, "__notes__", []),
            f"(on rank {rank} of {world_size}; failed: {sorted(errors)})",
            *hanging,
        ]
        raise error
    if hanging:
        pytest.fail(f"no end after {timeout} s\n" + "\n".join(hanging))
    return results


_CALL = """
import importlib.util, json, sys
path, name, arguments = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("ranks_of_a_test", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
getattr(module, name)(*json.loads(arguments))
"""


def _command(target, args):
    if callable(target):
        return [sys.executable, "-c", _CALL, inspect.getsourcefile(target), target.__name__, json.dumps(args)]
    return [sys.executable, os.fspath(target), *map(str, args)]


def _environment(rank, world_size, port, extra):
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    search = [package, *FOLDERS, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


@functools.cache
def _zygote(number, preload):
    return Zygote(_environment(0, 1, 0, None), preload)


def _start(command, environment, rank, preload):
    if preload is not None:
        # Two of them: the ranks' hashes of strings, hence the order of their sets, must differ as they do for users.
        return _zygote(rank % 2, preload).start(command[2:], environment)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_processes(world_size, target, *args, timeout=180, env=None, check=True, fresh=False, preload=()):
    """Runs a script, or a function at a test module's top level, in real processes with torchrun's variables.

    Arguments of a function travel as JSON. A function's processes are forked from one that has loaded torch and the
    modules of the tuple `preload`, unless `fresh` or `env` ask for new ones. Returns each rank's
    subprocess.CompletedProcess; with `check`, a rank that fails fails the test with its number and its last words.
    """
    port = free_ports(1)[0]
    command = _command(target, args)
    loaded = preload if callable(target) and not fresh and not env else None  # None: a new interpreter
    processes = [_start(command, _environment(rank, world_size, port, env), rank, loaded) for rank in range(world_size)]
    outputs = [None] * world_size
    # One reader a process: a rank that fills its pipe must not stop the others.
    readers = [
        threading.Thread(target=lambda r=rank: outputs.__setitem__(r, processes[r].communicate()), daemon=True)
        for rank in range(world_size)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + timeout
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in late:
        processes[rank].kill()
    for reader in readers:
        reader.join(10)
    texts = [outputs[rank] or ("", "") for rank in range(world_size)]
    done = [
        subprocess.CompletedProcess(command, process.returncode, own_output(stdout), stderr)
        for process, (stdout, stderr) in zip(processes, texts)
    ]
    for process in done:
        _check_text(process.stderr or "")
    failed = [rank for rank, process in enumerate(done) if process.returncode != 0]
    if late or (check and failed):
        reports = "\n".join(
            f"-- rank {rank} (exit {done[rank].returncode}):\n{done[rank].stderr[-3000:]}" for rank in failed
        )
        pytest.fail(
            f"ranks {late} did not end in {timeout} s\n{reports}" if late else f"ranks {failed} failed\n{reports}"
        )
    return done


@pytest.fixture(autouse=True)
def _no_process_group():
    """Ends what a test initialised in this process: it is not the next one's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def own_numbers(request):
    """A case draws the same numbers in every run, whichever cases ran before it in the process."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _few_threads():
    """Ranks as threads share the machine: one torch thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels(monkeypatch, tmp_path_factory):
    """One run's tests share inductor's cache: most of a compilation is torch's headers, the same each time."""
    folder = tmp_path_factory.getbasetemp()
    workers = "PYTEST_XDIST_WORKER" in os.environ
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str((folder.parent if workers else folder) / "inductor"))


def pytest_configure(config):
    config.addinivalue_line("markers", "apart: ranks share no memory, as if each were on a host of its own")
    config.addinivalue_line("markers", "both_ways: once with memory that the ranks share, once `apart`")
    config.addinivalue_line("markers", "slow: left out unless THOROUGH=1")
    config.addinivalue_line("markers", "costly: takes seconds: two cases of a grid, or each two values if THOROUGH=1")


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("both_ways"):
        metafunc.parametrize("_memory", ["shared", "apart"], indirect=True)


@pytest.fixture(autouse=True)
def _memory(request, monkeypatch):
    if getattr(request, "param", "shared") == "apart":
        monkeypatch.setenv("DEEPTIDE_TEST_APART", "1")


@pytest.fixture(autouse=True)
def _apart(request, monkeypatch):
    """At stage 3, parameters are sharded only between ranks that share no memory: what tests the gate needs them so."""
    if request.node.get_closest_marker("apart"):
        monkeypatch.setenv("DEEPTIDE_TEST_APART", "1")
