# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Times one optimizer step over a flat shard: norm, clip, update and cast, in the ways of several frameworks."""

import argparse
import importlib
import json
import math
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch

from large_pages import on_large_pages
from settings import BETAS, EPSILON

LEARNING_RATE = 1e-3  # what optimizer_ops.cc leaves at its default
CLIP = 1.0
CHECKED_NUMEL = 100_003
# {name: (type, states that it keeps, hyper-parameters)}. Muon is not here: products take its time, not streams.
RULES = {
    "SGD": ("SGD", 0, {}),
    "SGD, momentum": ("SGD", 1, {"momentum": 0.9}),
    "Lion": ("Lion", 1, {}),
    "Adagrad": ("Adagrad", 1, {}),
    "RMSprop": ("RMSprop", 1, {}),
    "RMSprop, momentum": ("RMSprop", 2, {"momentum": 0.9}),
    "AdamW": ("AdamW", 2, {}),
    "LAMB": ("Lamb", 2, {}),
}


# Peers' kernels of the same rules: {name: (states by name, hyper-parameters)}; each also counts its steps.
TORCH_FUSED = {
    "SGD": ("SGD", [], {}),
    "SGD, momentum": ("SGD", ["momentum_buffer"], {"momentum": 0.9}),
    "Adagrad": ("Adagrad", ["sum"], {}),
    "AdamW": ("AdamW", ["exp_avg", "exp_avg_sq"], {}),
}
DEEPSPEED = {
    "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", ["exp_avg"]),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", ["exp_avg_sq"]),
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", ["exp_avg", "exp_avg_sq"]),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="optimizer_ops.cc, built")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


class Shard:
    """The memory of a mixed-precision step, the same for every way."""

    def __init__(self, numel):
        self.master = on_large_pages(numel, torch.float32, 1.0)
        self.exp_avg = on_large_pages(numel, torch.float32, 0.01)
        self.exp_avg_sq = on_large_pages(numel, torch.float32, 0.01)
        self.wide_gradient = on_large_pages(numel, torch.float32, 0.1)
        self.gradient = on_large_pages(numel, torch.bfloat16, 0.1)
        self.param = on_large_pages(numel, torch.bfloat16, 1.0)
        self.low = on_large_pages(numel, torch.int16, 0)
        self.half_exp_avg = on_large_pages(numel, torch.bfloat16, 0.01)
        self.half_exp_avg_sq = on_large_pages(numel, torch.bfloat16, 0.01)

    def packed_master(self):
        """The fp32 numbers whose upper halves, rounded, are the parameters."""
        high = self.param.view(torch.int16).to(torch.int32) << 16
        return (high + self.low.to(torch.int32)).view(torch.float32)


def clip_scale(norm):
    if not math.isfinite(norm):
        raise ValueError(f"the gradient's norm is {norm}")
    return min(1.0, CLIP / (norm + 1e-6))


def deeptide_ways(shard):
    kernels = torch.ops.deeptide_bench
    states = [shard.exp_avg, shard.exp_avg_sq]
    squares, steps = torch.zeros(1, dtype=torch.float64), iter(range(1, sys.maxsize))

    def mixed():
        kernels.squares(shard.gradient, squares)
        scale = clip_scale(math.sqrt(squares.item()))
        kernels.rule_step("AdamW", shard.master, states, shard.gradient, shard.param, next(steps), scale, 1, {})

    def packed(kept):
        def step():
            kernels.squares(shard.gradient, squares)
            scale = clip_scale(math.sqrt(squares.item()))
            kernels.packed_step("AdamW", shard.param, shard.low, kept, shard.gradient, next(steps), scale)

        return step

    def update():
        kernels.rule_step("AdamW", shard.master, states, shard.wide_gradient, None, next(steps), 1.0, 1, {})

    def triad():
        kernels.triad([shard.master, *states], shard.wide_gradient)

    half_states = [shard.half_exp_avg, shard.half_exp_avg_sq]
    bf16 = {
        "Deeptide": mixed,
        "Deeptide, packed": packed(states),
        "Deeptide, packed, bf16 moments": packed(half_states),
    }
    return {"bf16": bf16, "fp32": {"triad": triad, "Deeptide": update}}


def rule_ways(shard):
    """{"rules": {name: step}} of every optimizer but Adam, and of triads over as many streams."""
    kernels = torch.ops.deeptide_bench
    states, steps = [shard.exp_avg, shard.exp_avg_sq], iter(range(1, sys.maxsize))

    def step_of(type, kept, rows, more):
        def step():
            kernels.rule_step(
                type, shard.master, states[:kept], shard.wide_gradient, None, next(steps), 1.0, rows, more
            )

        return step

    def triad_of(kept):
        return lambda: kernels.triad([shard.master, *states[:kept]], shard.wide_gradient)

    ways = {f"triad, {kept} states": triad_of(kept) for kept in (0, 1, 2)}
    for name, (type, kept, more) in RULES.items():
        ways[name] = step_of(type, kept, 1, more)
    return {"rules": ways}


def peers_step(shard, make_optimizer, states, first_step):
    """One step of a peer's optimizer over the shard, whose memory its states are too."""
    parameter = torch.nn.Parameter(shard.master)
    parameter.grad = shard.wide_gradient
    optimizer = make_optimizer([parameter])
    optimizer.state[parameter].update(dict(zip(states, (shard.exp_avg, shard.exp_avg_sq), strict=False)))
    optimizer.state[parameter]["step"] = first_step
    return optimizer.step


def peer_ways(shard):
    """{"rules": {"Lion, DeepSpeed": step}}: of the optimizers for which torch or DeepSpeed has a fused CPU kernel."""
    ways = {}
    for name, (type, states, more) in TORCH_FUSED.items():
        make = partial(getattr(torch.optim, type), lr=LEARNING_RATE, fused=True, **more)
        ways[f"{name}, torch fused"] = peers_step(shard, make, states, torch.tensor(0.0))
    for name, (module, type, states) in DEEPSPEED.items():
        try:
            make = partial(getattr(importlib.import_module(module), type), lr=LEARNING_RATE)
        except ImportError:
            continue  # ways_over says so
        ways[f"{name}, DeepSpeed"] = peers_step(shard, make, states, 0)
    return {"rules": ways}


def sign_ways(shard):
    """{"signs": {name: pass}}: what 1-bit optimizers do to a vector before and after it travels."""
    kernels = torch.ops.deeptide_bench
    scale, bits = torch.full((1,), 1e-3), on_large_pages(shard.master.numel() // 8, torch.uint8, 0)
    return {
        "signs": {
            "triad, 0 states": lambda: kernels.triad([shard.master], shard.wide_gradient),
            "norm": lambda: kernels.squares(shard.master, torch.zeros(1, dtype=torch.float64)),
            "split": lambda: kernels.split_signs(shard.master, scale, bits),
            "add": lambda: kernels.add_signs(bits, scale, shard.master),
            "set": lambda: kernels.set_signs(bits, scale, shard.master),
        }
    }


def staged_ways(shard, name, make_optimizer, first_step):
    """The ways of frameworks with an fp32 optimizer: a pass for each of widening, norm, clipping, update and cast."""
    parameter = torch.nn.Parameter(shard.master)
    parameter.grad = shard.wide_gradient
    optimizer = make_optimizer([parameter])
    optimizer.state[parameter].update(step=first_step, exp_avg=shard.exp_avg, exp_avg_sq=shard.exp_avg_sq)

    @torch.no_grad()
    def mixed():
        shard.wide_gradient.copy_(shard.gradient)
        shard.wide_gradient.mul_(clip_scale(torch.linalg.vector_norm(shard.wide_gradient).item()))
        optimizer.step()
        shard.param.copy_(shard.master)

    return {"bf16": {f"{name}, staged": mixed}, "fp32": {name: optimizer.step}}


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)


def cpu_adam(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, adamw_mode=True)


def ways_over(shard):
    """{precision: {name: step}}."""
    ways = deeptide_ways(shard) | rule_ways(shard) | sign_ways(shard)
    more = [peer_ways(shard), staged_ways(shard, "torch fused AdamW", fused_adamw, torch.tensor(0.0))]
    try:
        more.append(staged_ways(shard, "DeepSpeedCPUAdam", cpu_adam, 0))
    except ImportError as error:
        print(f"no DeepSpeed: {error}", file=sys.stderr)
    for other in more:
        for precision, steps in other.items():
            ways[precision].update(steps)
    return ways


def check():
    """One mixed-precision step, from the same state, must come to the same in all ways."""
    names = ways_over(Shard(1))["bf16"]
    results = {}
    for name in names:
        shard = Shard(CHECKED_NUMEL)
        ways_over(shard)["bf16"][name]()
        results[name] = shard.packed_master() if "packed" in name else shard.master
    reference = results.pop("torch fused AdamW, staged")
    for name, master in results.items():
        if (off := float((master - reference).abs().max())) > LEARNING_RATE * 1e-2:
            raise ValueError(f"{name}: a parameter is {off:.1e} off torch's after a step of {LEARNING_RATE:.0e}")


def measure(shard, repetitions):
    """Interleaved, every other time backwards; after one call of each that is not timed."""
    ways = ways_over(shard)
    steps = [(precision, *way) for precision, by_name in ways.items() for way in by_name.items()]
    seconds = {}
    for number in range(repetitions + 1):
        for precision, name, step in steps if number % 2 else reversed(steps):
            begin = time.perf_counter()
            step()
            if number:
                seconds.setdefault(precision, {}).setdefault(name, []).append(time.perf_counter() - begin)
    return seconds


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        torch.ops.load_library(arguments.library)
        check()
        result = measure(Shard(arguments.numel), arguments.repetitions)
    except Exception as error:
        traceback.print_exc()
        arguments.result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    arguments.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
