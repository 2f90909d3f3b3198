#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trains GPTs of growing size in so much memory, states and parameters in files; prints which ones do, in Markdown.

Each job runs in a memory control group (version 1, as root), whose peak counts all its processes.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import output
from jobs import free_port, script

WORLD = 2
WIDTH = 2048
STEPS = 2
GIB = 1 << 30
GROUPS = Path("/sys/fs/cgroup/memory")
LEGEND = """\
Two ranks of one thread, stage 3, bf16, AdamW, one sequence of 128 bytes per rank, two steps. Both engines get the same
configuration: parameters and optimizer states in files, nothing kept gathered. Peak: of the job's memory control group,
the page cache included. The kernel kills a process of the job when the limit is reached. A model trains if both steps
end."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("deeptide", "deepspeed"), default=["deepspeed", "deeptide"])
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 10, 15, 20, 30, 40], help="each 50 M parameters")
    parser.add_argument("--limit", type=float, default=20.0, help="GiB of a job")
    parser.add_argument("--folder", type=Path, default=output.ROOT / "runs" / "largest", help="for the files")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a job")
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build" / "python", help="folder to import from")
    parser.add_argument("--rank", choices=("deeptide", "deepspeed"), help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-largest")
    return parser.parse_args()


# -- one rank ---------------------------------------------------------------------------------------------------------


def config_of(folder):
    files = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
            "sub_group_size": 50_000_000,
            "reduce_bucket_size": 20_000_000,
            # A buffer holds the largest parameter; DeepSpeed's default of 1e8 elements is for larger ones.
            "offload_param": files | {"buffer_size": 4 * WIDTH * WIDTH},
            "offload_optimizer": files | {"buffer_count": 4},
        },
    }


def train(options):
    sys.path.insert(0, str(output.ROOT / "examples" / "gpt"))
    import torch

    from model import GPT, GPTConfig

    torch.set_num_threads(1)
    if options.rank == "deepspeed":
        import deepspeed as engine_module

        engine_module.init_distributed("gloo")
    else:
        import deeptide as engine_module
    rank = int(os.environ["RANK"])
    config = config_of(options.folder)
    with engine_module.zero.Init(config_dict_or_path=config):
        model = GPT(GPTConfig(context=128, width=WIDTH, layers=options.layers[0], heads=32), seed=0)
    engine, *_ = engine_module.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        tokens = torch.randint(256, (1, 129), generator=generator)
        began = time.monotonic()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item(), "seconds": time.monotonic() - began}), flush=True)


# -- the jobs ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_group(limit):
    group = GROUPS / f"deeptide-largest-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int(limit * GIB)))
        yield group
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), 9)
        while (group / "cgroup.procs").read_text().strip():
            time.sleep(0.1)
        group.rmdir()


def environment_of(rank, port, options):
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "LOCAL_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1,
        "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions",
        "PYTHONPATH": options.deeptide, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    return os.environ | {name: str(value) for name, value in own.items()}


def wait(processes, timeout):
    """Why the job failed; None: it did not."""
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [process.returncode for process in processes if process.poll()]
        if failed:
            return "killed" if failed[0] == -9 else f"exit code {failed[0]}"
        if time.monotonic() > end:
            return f"not done in {timeout:g} s"
        time.sleep(0.2)
    return None


def run_job(engine, layers, options):
    command = [*script("largest"), "--rank", engine, "--layers", str(layers), "--folder", str(options.folder)]
    port, processes = free_port(), []
    options.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder.parent / f"largest-{engine}-{layers}.log"
    with memory_group(options.limit) as group, log.open("w") as said:
        for rank in range(WORLD):
            enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
            environment = environment_of(rank, port, options)
            job = subprocess.Popen([*enter, *command], env=environment, stdout=said, stderr=subprocess.STDOUT)
            processes.append(job)
        reason = wait(processes, options.timeout)
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        kills = re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())
    for process in processes:
        process.wait()
    subprocess.run(["rm", "-rf", options.folder], check=True)
    steps = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
    if len(steps) == STEPS:
        reason = None  # what fails after them, at exit, is another matter
    return {"reason": reason, "peak": peak, "killed": bool(kills and int(kills[1])), "steps": steps}


def rows_of(options, jobs):
    for job in jobs:
        result = job["result"]
        answer = "trains" if result["reason"] is None else result["reason"]
        if result["killed"]:
            answer = "out of memory"
        last = result["steps"][-1] if result["steps"] else {}
        yield [
            f"{12 * job['layers'] * WIDTH**2 / 1e9:.2f} B", job["engine"], answer, f"{result['peak'] / GIB:.2f}",
            f"{last['seconds']:.1f}" if last else "",
        ]  # fmt: skip


def main():
    options = parse_arguments()
    if options.rank:
        train(options)
        return
    if os.geteuid() != 0 or not GROUPS.is_dir():
        raise SystemExit("bench-largest needs root and memory control groups of version 1")
    record = output.new_record() | {"jobs": []}
    for engine in options.engines:
        for layers in options.layers:
            result = run_job(engine, layers, options)
            print(f"{engine}, {layers} layers: {result}", file=sys.stderr, flush=True)
            record["jobs"].append({"engine": engine, "layers": layers, "result": result})
            if result["reason"] is not None:
                break  # a larger one does not either
    header = ["parameters", "engine", "", "peak (GiB)", "a step (s)"]
    text = [output.head(f"The largest model in {options.limit:g} GiB", record, LEGEND)]
    output.write(options, "\n".join([*text, output.table(header, rows_of(options, record["jobs"]))]), record)


if __name__ == "__main__":
    main()
