# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Shows where a step's time goes on the GPU: kernels by their time, the engine's own apart, and gaps between them."""

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import deeptide
from gpu.gpu_model import SHAPES, Decoder

OURS = ("index_kernel", "group_kernel", "copy_kernel")
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def gaps_of(spans, least_us=20.0):
    """[(gap in us, kernel before, kernel after)] between kernels in the order of their begins, the longest first."""
    found, end, last = [], None, ""
    for begin, length, name in sorted(spans):
        if end is not None and begin - end > least_us:
            found.append((begin - end, last, name))
        if end is None or begin + length > end:
            end, last = begin + length, name
    return sorted(found, reverse=True)


def spans_of(profiled):
    kernels = (event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start, event.time_range.elapsed_us(), event.name) for event in kernels]


def report(spans, numel):
    by_name = {}
    for _, length, name in spans:
        times, total = by_name.get(name, (0, 0.0))
        by_name[name] = (times + 1, total + length)
    rows = sorted(by_name.items(), key=lambda item: -item[1][1])
    for name, (times, total) in rows[:25]:
        print(f"{total / 1000:9.3f} ms {times:6d} x {name[:110]}")
    for part in (*OURS, "Memcpy", "norm"):
        total = sum(length for _, length, name in spans if part.lower() in name.lower())
        print(f"{part}: {total / 1000:.3f} ms, {1000 * total / numel:.3f} ns per 1000 parameters")
    for gap, before, after in gaps_of(spans)[:10]:
        print(f"gap of {gap:.0f} us between {before[:60]} and {after[:60]}")
    busy = sum(length for _, length, _ in spans)
    longest = max([0.0, *(gap for gap, _, _ in gaps_of(spans))])
    print(f"{len(spans)} kernels, {busy / 1000:.1f} ms in all, longest gap {longest:.0f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-xl", choices=SHAPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.model]
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Decoder(shape)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1))
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deeptide.initialize(model=model, config=CONFIG)

    def step():
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step()
    spans = spans_of(profiled)
    if options.json:
        options.json.write_text(json.dumps(spans))
    report(spans, numel)


if __name__ == "__main__":
    main()
