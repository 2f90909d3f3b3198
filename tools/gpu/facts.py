# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tells what this machine is, and what it can do at most: bytes copied and products multiplied per second."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import torch


def _said(*words):
    if shutil.which(words[0]) is None:
        return "not found"
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout or done.stderr).strip()


def _knows_batch():
    """Whether threads may be marked as background work; some containers have one policy only."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError as error:
        return str(error)
    return True


def facts():
    headers = Path(torch.__file__).parent / "include" / "c10"
    stream = headers / "core" / "Stream.h"
    return {
        "system": " ".join(platform.uname()),
        "python": platform.python_version(),
        "Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "torch tells streams' handles": "native_handle" in stream.read_text() if stream.exists() else "no header",
        "nvcc": _said("/usr/local/cuda/bin/nvcc" if shutil.which("nvcc") is None else "nvcc", "--version").splitlines()[
            -1
        ],
        "compiler": _said("c++", "--version").splitlines()[0],
        "cmake": _said("cmake", "--version").splitlines()[0],
        "ninja": _said("ninja", "--version"),
        "gpus": _said(
            "nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm", "--format=csv,noheader"
        ),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "locked memory": _said("sh", "-c", "ulimit -l"),
        "/dev/shm": _said("df", "-h", "--output=size", "/dev/shm").split("\n")[-1].strip(),
        "SCHED_BATCH": _knows_batch(),
        "TF32": torch.backends.cuda.matmul.allow_tf32,
    }


def _best_seconds(work, device, repeats=5):
    """The best of several runs, each waited for."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def ceilings(device):
    """Copies count bytes read and written. Units: GB/s, Tflop/s."""
    size, side = (8 << 30, 8192) if device == "cuda" else (256 << 20, 512)
    source = torch.empty(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    copied = _best_seconds(lambda: target.copy_(source), device)
    multiplied = _best_seconds(lambda: matrix @ matrix, device)
    found = {"copy_GB_s": size / copied / 1e9, "bf16_Tflop_s": 2 * side**3 / multiplied / 1e12}
    if device == "cuda":
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        for name, work in (
            ("to_device_GB_s", lambda: target[: 1 << 30].copy_(host, non_blocking=True)),
            ("to_host_GB_s", lambda: host.copy_(target[: 1 << 30], non_blocking=True)),
        ):
            found[name] = (1 << 30) / _best_seconds(work, device) / 1e9
    return {name: round(value, 2) for name, value in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = facts()
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    found |= ceilings(options.device)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(", ".join(f"{name} {value}" for name, value in found.items() if name.endswith("_s")))


if __name__ == "__main__":
    main()
