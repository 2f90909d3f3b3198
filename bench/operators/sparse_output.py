# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A masked-language BERT's step with a head over all rows, and over the labelled ones: a Markdown table.

Runs alternate in one process. --share: the rows with a label (BERT masks 15 %).
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
import transformers
from deeptide import ops


def make(arguments):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30_522,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        intermediate_size=4 * arguments.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).to(arguments.dtype)


def dense(model, tokens, labels):
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1).float(), labels.flatten())


def sparse(model, tokens, labels):
    """Over labelled rows alone."""
    hidden, targets = ops.labelled_rows(model.bert(input_ids=tokens).last_hidden_state, labels)
    head = model.cls.predictions
    return ops.linear_cross_entropy(head.transform(hidden), head.decoder.weight, targets, bias=head.decoder.bias)


def step_ms(model, loss_of, tokens, labels):
    begin = time.perf_counter()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return 1000 * (time.perf_counter() - begin), loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| type | rows | head over all, ms | over labelled rows, ms | ratio | losses |\n|---|---|---|---|---|---|")
    for arguments.dtype in (torch.float32, torch.bfloat16):
        model = make(arguments)
        tokens = torch.randint(0, 30_522, (arguments.batch, arguments.length))
        labels = torch.where(torch.rand(tokens.shape) < arguments.share, tokens, -100)
        times = {dense: [], sparse: []}
        for run in range(arguments.runs + 1):
            for way in (dense, sparse):
                ms, loss = step_ms(model, way, tokens, labels)
                if run > 0:  # the first fills caches
                    times[way].append((ms, loss))
        (a, one), (b, other) = (
            (statistics.median(ms for ms, _ in seen), seen[-1][1]) for seen in (times[dense], times[sparse])
        )
        kind = str(arguments.dtype).removeprefix("torch.")
        print(f"| {kind} | {tokens.numel()} | {a:.1f} | {b:.1f} | {a / b:.2f} | {one:.4f}, {other:.4f} |")


if __name__ == "__main__":
    main()
