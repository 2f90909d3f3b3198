# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one job: fresh processes, one per rank; nothing of it outlives the call."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from contenders.zero_config import SWAP_FOLDER
from memory import JobMemory
from settings import SIZES, TUNED_ALLOCATOR, WORLD

PROGRAM = Path(__file__).with_name("__main__.py")
SET_UP_SECONDS = 180  # that a job may take besides its steps


@dataclass(frozen=True)
class Place:
    """The place of a rank: the words before its command, and what its environment has of its own."""

    prefix: tuple = ()
    environment: dict | None = None


def script(name):
    """The words that run a script of a room here."""
    return [sys.executable, PROGRAM, name]


def free_ports(count):
    """Ports that differ: jobs that begin together would find the same one."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port():
    return free_ports(1)[0]


def _environment(rank, world, port, allocator, deeptide_path, threads):
    """All contenders get the same one; LOCAL_SIZE and DS_ACCELERATOR are what DeepSpeed needs for ranks on one CPU."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GLIBC_TUNABLES", "MALLOC_"))}
    environment = dict(
        inherited,
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), CUDA_VISIBLE_DEVICES="",
        DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=f"{sys.prefix}/torch_extensions",
        PATH=f"{sys.prefix}/bin:{os.environ['PATH']}",
    )  # fmt: skip
    if allocator == "tuned":
        environment["GLIBC_TUNABLES"] = TUNED_ALLOCATOR
    if deeptide_path:
        environment["PYTHONPATH"] = str(deeptide_path)
    return environment


def _failure(processes):
    failures = (
        f"rank {rank} exited with {process.returncode}" for rank, process in enumerate(processes) if process.poll()
    )
    return next(failures, None)


def _wait(processes, timeout, memory, stopped):
    """Waits for all ranks; returns why the job failed, or None. After one rank's failure the others get two seconds."""
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            return _failure(processes) or f"timed out after {timeout:g} s"
        if stopped is not None and stopped.is_set():
            return "stopped: a job beside it failed"
        if _failure(processes):
            end = min(end, time.monotonic() + 2)
        memory.sample([process.pid for process in processes])
        time.sleep(0.05)
    return _failure(processes)


def _kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # a rank that ended well left no group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove_left_overs(port):
    """DeepSpeed leaves its shared memory, 66 MiB a rank, in /dev/shm, and the files of its states."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(SWAP_FOLDER, ignore_errors=True)


def _modified(path):
    return path.stat().st_mtime_ns


def _outcome(reason, results, logs):
    if reason is None:
        return {"ranks": [json.loads(result.read_text()) for result in results]}
    # The first to write is the cause; what the others say of a lost peer is its consequence.
    told = [json.loads(result.read_text()) for result in sorted(filter(Path.exists, results), key=_modified)]
    for words in told:
        if "skipped" in words:
            return words
    reason = next((words["error"] for words in told if "error" in words), reason)
    return {"error": reason, "logs": [log.read_text(errors="replace")[-4000:] for log in logs]}


def run_ranks(
    command, world, timeout, memory, allocator="default", deeptide_path=None, threads=1, places=None, port=None,
    stopped=None,
):  # fmt: skip
    """Runs `command` and `--result FILE` once a rank; each rank writes what it measured into that file, as JSON.

    port: of the job; None: a free one. stopped: an event that ends it.
    Returns {"ranks": [what each rank measured]}, {"skipped": reason} or {"error": reason, "logs": [...]}.
    """
    port = free_port() if port is None else port
    processes, places = [], places or [Place()] * world
    with tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(world)]
        logs = [Path(folder, f"{rank}.log") for rank in range(world)]
        try:
            for rank in range(world):
                with logs[rank].open("w") as log:
                    processes.append(
                        subprocess.Popen(
                            [*places[rank].prefix, *command, "--result", results[rank]],
                            env=_environment(rank, world, port, allocator, deeptide_path, threads)
                            | (places[rank].environment or {}),
                            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                        )
                    )  # fmt: skip
            reason = _wait(processes, timeout, memory, stopped)
        finally:
            _kill(processes)
            _remove_left_overs(port)
        return _outcome(reason, results, logs)


def run_watched(command, world, timeout, **settings):
    """run_ranks' answer, and under "job_peak" what all ranks took together between their "steps_between"."""
    memory = JobMemory()
    outcome = run_ranks(command, world, timeout, memory, **settings)
    if "ranks" in outcome:
        begins, ends = zip(*(rank["steps_between"] for rank in outcome["ranks"]), strict=True)
        outcome["job_peak"] = memory.peak(min(begins), max(ends))
    return outcome


def run_job(contender, precision, allocator, options, places=None, more=(), **settings):
    """Trains a little: run_watched's answer for worker.py, with `more` words for it."""
    world = len(places) if places else WORLD
    command = [
        *script("worker"), "--contender", contender, "--model", options.model, "--precision", precision,
        "--warmup", str(options.warmup), "--steps", str(options.steps), *more,
    ]  # fmt: skip
    steps_seconds = (options.warmup + options.steps) * SIZES[options.model].slowest_step
    timeout = options.timeout or SET_UP_SECONDS + steps_seconds
    settings |= {"allocator": allocator, "deeptide_path": options.deeptide, "places": places}
    return run_watched(command, world, timeout, **settings)
