# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of DeepSpeed's all-reduce through shared memory, timed as comm_bench.cc times the others."""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed

from large_pages import on_large_pages

WINDOW = 0.02  # seconds; as in comm_bench.cc
MAX_CALLS = 5000


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def measure(all_reduce, size, repetitions):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensor = on_large_pages(size // 4, torch.float32, rank + 1.0)
    all_reduce(tensor)
    if not torch.all(tensor == world * (world + 1) / 2):
        raise ValueError(f"all-reduce of {size} bytes: got {tensor.min()} to {tensor.max()}")
    seconds = []
    for _ in range(repetitions):
        first = time_calls(all_reduce, tensor, min(max((16 << 20) // size, 1), 200))
        slowest = torch.tensor(first, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        calls = min(max(int(WINDOW / slowest.item()), 1), MAX_CALLS)
        seconds.append(time_calls(all_reduce, tensor, calls))
    return {"collective": "all-reduce", "path": "DeepSpeed", "bytes": size, "seconds": seconds}


def time_calls(all_reduce, tensor, calls):
    """Seconds a call."""
    tensor.zero_()
    torch.distributed.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        all_reduce(tensor)
    return (time.perf_counter() - begin) / calls


def main():
    arguments = parse_arguments()
    try:
        import deepspeed
        from deepspeed.ops.op_builder import ShareMemCommBuilder
    except ImportError as error:
        arguments.result.write_text(json.dumps({"skipped": f"cannot be imported: {error}"}))
        sys.exit(1)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")  # loads the operator, since LOCAL_SIZE says that all ranks are on this host
    torch.set_num_threads(1)
    if ShareMemCommBuilder().load().vector_kernel_level() < 1:
        arguments.result.write_text(json.dumps({"skipped": "its shared memory needs AVX2 for fp32"}))
        sys.exit(1)
    # Calls what deepspeed.comm.inference_all_reduce comes to, without what Python adds to a small message.
    all_reduce = torch.ops.deepspeed.inference_all_reduce_
    sizes = [int(size) for size in arguments.sizes.split(",")]
    try:
        rows = [measure(all_reduce, size, arguments.repetitions) for size in sizes]
    except Exception as error:
        traceback.print_exc()
        arguments.result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    arguments.result.write_text(json.dumps(rows))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
