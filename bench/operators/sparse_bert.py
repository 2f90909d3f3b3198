# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A BERT that trains on long sequences with block-sparse attention, beside dense: a Markdown table.

Each way trains in this process under an engine, one after the other, on batches of random words of which 15 % are
masked, always the same batch, so that the loss must fall. --dense-until: the longest length for dense attention.
"""

import argparse
import statistics
import time

import deeptide
import torch
import transformers
from deeptide import _C
from deeptide.ops.sparse_attention import BigBirdSparsityConfig, use_in_transformers

import memory
import output
from operators import sparse_output


def make(options, length, is_sparse):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8192,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        intermediate_size=4 * options.width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config).train()
    if is_sparse:
        use_in_transformers(model, BigBirdSparsityConfig(options.width // 64, options.block))
    sections = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": options.dtype == "bf16"},
    }
    return deeptide.initialize(model=model, config=sections)[0]


def train(options, length, is_sparse):
    """(seconds per step, MiB that training adds at most, first loss, last loss)."""
    _C.release_idle_cpu_memory()
    memory.reset_peak_rss()
    before = memory.peak_rss()
    engine = make(options, length, is_sparse)
    tokens = torch.randint(0, 8192, (1, length), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.15, tokens, -100)
    times, losses = [], []
    for _ in range(options.steps):
        begin = time.perf_counter()
        loss = sparse_output.sparse(engine.module, tokens, labels)
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    engine.destroy()
    return statistics.median(times[1:] or times), (memory.peak_rss() - before) / 2**20, losses[0], losses[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--dense-until", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    output.add_arguments(parser, "sparse-bert")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _C.install_cpu_allocator()
    record, rows = {**output.new_record(), "runs": []}, []
    train(options, min(options.lengths), is_sparse=True)  # loads what all runs share
    for length in options.lengths:
        for is_sparse in (False, True) if length <= options.dense_until else (True,):
            seconds, size, first, last = train(options, length, is_sparse)
            name = "BigBird" if is_sparse else "dense"
            record["runs"].append({"length": length, "attention": name, "seconds": seconds, "losses": [first, last]})
            rows.append([length, name, f"{seconds:.2f}", f"{size:.0f}", f"{first:.4f}", f"{last:.4f}"])
    text = output.head("A BERT on long sequences", record, f"{options.steps} steps; the median of all but the first.")
    header = ["length", "attention", "s per step", "MiB", "first loss", f"loss of step {options.steps}"]
    output.write(options, text + "\n" + output.table(header, rows), record)


if __name__ == "__main__":
    main()
