# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.ops beside torch, forward and backward, in one interleaved run on one thread: a Markdown table."""

import argparse
import time

import torch
import torch.nn.functional as F
from deeptide import _C, ops

ROWS = 256


def leaf(*shape, dtype):
    return torch.randn(*shape).to(dtype).requires_grad_()


def gelu(width, dtype):
    x = leaf(ROWS, 4 * width, dtype=dtype)
    return (x,), lambda: ops.gelu_tanh(x), lambda: F.gelu(x, approximate="tanh")


def linear(outside, inside):
    def case(width, dtype):
        x, w, b = leaf(ROWS, inside * width, dtype=dtype), leaf(outside * width, inside * width, dtype=dtype), None
        b = leaf(outside * width, dtype=dtype)
        return (x, w, b), lambda: ops.linear(x, w, b), lambda: F.linear(x, w, b)

    return case


def cross_entropy(classes):
    def case(_, dtype):
        x, y = leaf(ROWS, classes, dtype=dtype), torch.randint(0, classes, (ROWS,))
        return (x,), lambda: ops.cross_entropy(x, y), lambda: F.cross_entropy(x.float(), y)

    return case


def linear_cross_entropy(classes):
    def case(width, dtype):
        x, w, y = leaf(ROWS, width, dtype=dtype), leaf(classes, width, dtype=dtype), torch.randint(0, classes, (ROWS,))
        return (
            (x, w),
            lambda: ops.linear_cross_entropy(x, w, y),
            lambda: F.cross_entropy(F.linear(x, w).float(), y),
        )

    return case


def norm_inputs(width, dtype):
    return leaf(ROWS, width, dtype=dtype), leaf(width, dtype=dtype), leaf(width, dtype=dtype)


def layer_norm(width, dtype):
    x, w, b = norm_inputs(width, dtype)
    return (x, w, b), lambda: ops.layer_norm(x, (width,), w, b), lambda: F.layer_norm(x, (width,), w, b)


def residual_layer_norm(width, dtype):
    x, w, b = norm_inputs(width, dtype)
    residual = leaf(ROWS, width, dtype=dtype)

    def torchs():
        summed = x + residual
        return F.layer_norm(summed, (width,), w, b), summed

    return (x, residual, w, b), lambda: ops.residual_layer_norm(x, residual, (width,), w, b), torchs


def attention(sequences, length):
    def case(width, dtype):
        fused = torch.randn(sequences, length, 3, width // 64, 64).to(dtype)
        inputs = [part.detach().requires_grad_() for part in fused.permute(2, 0, 3, 1, 4).unbind(0)]
        return (
            tuple(inputs),
            lambda: ops.attention(*inputs, causal=True),
            lambda: F.scaled_dot_product_attention(*inputs, is_causal=True),
        )

    return case


CASES = {
    **{f"attention, D, {2048 // n} x {n}": attention(2048 // n, n) for n in (128, 256, 512, 1024)},
    "gelu_tanh (256, 4D)": gelu,
    "layer_norm (256, D)": layer_norm,
    "residual_layer_norm (256, D)": residual_layer_norm,
    "linear D to 4D": linear(4, 1),
    "linear 4D to D": linear(1, 4),
    "cross_entropy V 8192": cross_entropy(8192),
    "cross_entropy V 50304": cross_entropy(50304),
    "linear_cross_entropy V 8192": linear_cross_entropy(8192),
    "linear_cross_entropy V 50304": linear_cross_entropy(50304),
}


def milliseconds(function, inputs):
    for x in inputs:
        x.grad = None
    begin = time.perf_counter()
    results = function()
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return 1e3 * (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _C.install_cpu_allocator()  # for both alike: page faults are another subject
    print("| operator | D | type | torch (ms) | deeptide (ms) | torch / deeptide |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for name, case in CASES.items():
            for width in (512, 1024) if "D" in name or "linear" in name else (512,):
                inputs, mine, torchs = case(width, dtype)
                times = [(milliseconds(torchs, inputs), milliseconds(mine, inputs)) for _ in range(arguments.rounds)]
                theirs, ours = (min(column) for column in zip(*times[2:], strict=True))
                kind = "fp32" if dtype == torch.float32 else "bf16"
                print(f"| {name} | {width} | {kind} | {theirs:.3f} | {ours:.3f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
