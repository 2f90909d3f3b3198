# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention beside dense, and the transformer layer beside Transformers' BERT layer, forward and backward.

Ways alternate in one process, and the median counts. Memory is what a forward and backward adds to the process at most.
--only names one of the parts: attention over lengths, over densities at one length, or the layer.
"""

import argparse
import statistics
import time

import torch
import transformers
from deeptide import _C
from deeptide.ops.sparse_attention import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig
from deeptide.ops.sparse_attention.attention import sparse_attention
from deeptide.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.bert.modeling_bert import BertLayer

import memory
import output


def mebibytes(function, inputs, forward=False):
    """The most that one pass adds to the process's memory."""
    for x in inputs:
        x.grad = None
    _C.release_idle_cpu_memory()
    memory.reset_peak_rss()
    before = memory.peak_rss()
    milliseconds(function, inputs, forward)
    return (memory.peak_rss() - before) / 2**20


def milliseconds(function, inputs, forward=False):
    if forward:
        with torch.no_grad():
            begin = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - begin)
    for x in inputs:
        x.grad = None
    begin = time.perf_counter()
    function().float().sum().backward()
    return 1e3 * (time.perf_counter() - begin)


def first_of(outputs):
    """A layer's output: of some versions of Transformers it is in a tuple."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def medians(ways, inputs, runs, forward=()):
    """By name; None for a way that this machine or length refuses, whose reason is printed below the table."""
    times, refused = {name: [] for name in ways}, {}
    for run in range(runs + 1):
        for name, function in ways.items():
            if name in refused:
                continue
            try:
                spent = milliseconds(function, inputs, name in forward)
            except Exception as error:
                refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            if run > 0:  # the first compiles and fills caches
                times[name].append(spent)
    return {name: statistics.median(seen) if seen else None for name, seen in times.items()}, refused


def flex(layout, block, compiled):
    """flex_attention over the same layout; None where torch cannot make its mask."""
    length = layout.size(-1) * block

    def visible(_batch, head, row, column):
        return layout[head, row // block, column // block] > 0

    mask = create_block_mask(visible, None, layout.size(0), length, length, device="cpu", BLOCK_SIZE=max(block, 128))
    attend = torch.compile(flex_attention) if compiled else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=mask)


def attention(options, record):
    rows = []
    for length in options.lengths:
        shape = (1, options.heads, length, options.head_width)
        q, k, v = inputs = [torch.randn(shape).to(options.dtype).requires_grad_() for _ in range(3)]
        for name, config in (
            ("BigBird", BigBirdSparsityConfig(options.heads, options.block)),
            ("sliding window", LocalSlidingWindowSparsityConfig(options.heads, options.block)),
        ):
            layout = config.make_layout(length)
            ways = {
                "dense": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
                "sparse": lambda q=q, k=k, v=v, layout=layout: sparse_attention(q, k, v, layout, options.block),
            }
            if length <= options.flex_until:
                # Without a compiler it makes all scores, as dense attention in plain operators does.
                attend = flex(layout, options.block, options.compile)
                ways["flex"] = lambda q=q, k=k, v=v, attend=attend: attend(q.detach(), k.detach(), v.detach())
                ways["sparse forward"] = ways["sparse"]
            # flex_attention has no backward on a CPU: it is compared forward alone.
            taken, refused = medians(ways, inputs, options.runs, forward=("flex", "sparse forward"))
            share = layout.float().mean().item()
            held = {way: mebibytes(ways[way], inputs) for way in ("dense", "sparse") if way not in refused}
            taken |= {f"{way} MiB": size for way, size in held.items()}
            record["attention"].append({"length": length, "layout": name, "share": share, **taken, "refused": refused})
            named = ("dense", "sparse", "flex", "sparse forward")
            cells = [f"{taken[way]:.1f}" if taken.get(way) else refused.get(way, "-") for way in named]
            ratio = f"{taken['dense'] / taken['sparse']:.2f}" if taken["dense"] else "-"
            sizes = [f"{held[way]:.0f}" if way in held else "-" for way in ("dense", "sparse")]
            rows.append([length, name, f"{100 * share:.1f} %", *cells[:2], ratio, *sizes, *cells[2:]])
    both = ["dense (SDPA), ms", "sparse, ms", "dense / sparse", "dense, MiB", "sparse, MiB"]
    header = ["length", "layout", "blocks", *both, "flex_attention forward, ms", "sparse forward, ms"]
    return output.table(header, rows)


def densities(options, record):
    """Layouts of random blocks at one length: the density below which sparse attention takes less time."""
    length, rows = options.density_length, []
    blocks = length // options.block
    shape = (1, options.heads, length, options.head_width)
    q, k, v = inputs = [torch.randn(shape).to(options.dtype).requires_grad_() for _ in range(3)]
    for share in options.densities:
        generator = torch.Generator().manual_seed(0)
        layout = (torch.rand(options.heads, blocks, blocks, generator=generator) < share).long()
        layout.diagonal(dim1=1, dim2=2).fill_(1)  # no row is empty
        ways = {
            "dense": lambda: F.scaled_dot_product_attention(q, k, v),
            "sparse": lambda layout=layout: sparse_attention(q, k, v, layout, options.block),
        }
        taken, _ = medians(ways, inputs, options.runs)
        density, ratio = layout.float().mean().item(), taken["dense"] / taken["sparse"]
        record["densities"].append({"length": length, "density": density, **taken})
        rows.append([f"{100 * density:.1f} %", f"{taken['dense']:.1f}", f"{taken['sparse']:.1f}", f"{ratio:.2f}"])
    wins = [row[0] for row in rows if float(row[3]) > 1]
    best = (
        f"At length {length} sparse attention takes less time up to a density of {wins[-1] if wins else 'none tried'}."
    )
    return output.table(["density", "dense (SDPA), ms", "sparse, ms", "dense / sparse"], rows) + best + "\n"


def layers(options, hidden, dropout):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        hidden_act="gelu_new",
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    sizes = {
        "hidden_size": hidden,
        "heads": hidden // 64,
        "attn_dropout_ratio": dropout,
        "hidden_dropout_ratio": dropout,
        "num_hidden_layers": 12,
        "initializer_range": 0.02,
    }
    mine = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**sizes, pre_layer_norm=False)).to(options.dtype)
    return BertLayer(config).to(options.dtype), mine


def transformer(options, record):
    rows = []
    for hidden in options.widths:
        for dropout in (0.0, 0.1):
            theirs, mine = layers(options, hidden, dropout)
            x = torch.randn(options.batch, options.length, hidden).to(options.dtype).requires_grad_()
            ways = {
                "Transformers": lambda theirs=theirs, x=x: first_of(theirs(x)),
                "deeptide": lambda mine=mine, x=x: mine(x),
            }
            taken, _ = medians(ways, [x, *theirs.parameters(), *mine.parameters()], options.runs)
            record["layer"].append({"hidden": hidden, "dropout": dropout, **taken})
            a, b = taken["Transformers"], taken["deeptide"]
            rows.append([hidden, dropout, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"])
    return output.table(["width", "dropout", "BertLayer, ms", "DeepSpeedTransformerLayer, ms", "ratio"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["attention", "densities", "layer"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--density-length", type=int, default=4096)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0])
    parser.add_argument("--flex-until", type=int, default=4096, help="uncompiled it keeps all scores")
    parser.add_argument("--compile", action="store_true", help="flex_attention by torch.compile")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    output.add_arguments(parser, "less-operators")
    options = parser.parse_args()
    record = {**output.new_record(), "attention": [], "densities": [], "layer": []}
    options.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.set_num_threads(options.threads)
    _C.install_cpu_allocator()  # for all alike
    parts = {"attention": attention, "densities": densities, "layer": transformer}
    text = output.head("Operators that do less", record, "Forward and backward, the median of interleaved runs.")
    for name, part in parts.items():
        if options.only in (None, name):
            text += "\n" + part(options, record)
    output.write(options, text, record)


if __name__ == "__main__":
    main()
