# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A whole training step's products against this machine's rate of torch's matrix products: a Markdown table.

A GPT whose blocks are those of the transformer layer, and the same GPT in plain torch, eager and compiled, train in
turns, each in a process of its own, forward, backward and AdamW. A step counts 6 flops per parameter of a product and
token, and those of attention. The rate of products, the three of the block's largest layer, is measured in each turn,
since machines change their clock: shares are of the turn's own rate.
"""

import argparse
import dataclasses
import multiprocessing
import statistics
import time

import deeptide
import torch
from deeptide import _C
from deeptide.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

import model
import output
from settings import BETAS, EPSILON, SIZES, WEIGHT_DECAY


class FusedBlocks(model.GPT):
    """The GPT with the layer's blocks, which take a causal mask."""

    def __init__(self, size):
        super().__init__(size)
        config = DeepSpeedTransformerConfig(
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            heads=size.heads,
            attn_dropout_ratio=0.0,
            hidden_dropout_ratio=0.0,
            num_hidden_layers=size.layers,
            initializer_range=0.02,
            pre_layer_norm=True,
        )
        self.blocks = torch.nn.ModuleList(DeepSpeedTransformerLayer(config) for _ in range(size.layers))
        mask = torch.full((1, 1, size.context, size.context), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x_bt, y_bt):
        hidden_btd = self.tokens(x_bt) + self.positions(torch.arange(x_bt.shape[1]))
        mask = self.mask.to(hidden_btd.dtype)
        for block in self.blocks:
            hidden_btd = block(hidden_btd, mask)
        hidden = self.norm(hidden_btd).flatten(0, 1)
        return deeptide.ops.linear_cross_entropy(hidden, self.head.weight, y_bt.flatten())


def engine_step(size, dtype):
    torch.manual_seed(0)
    net = FusedBlocks(size)
    adamw = {"lr": 1e-4, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    config = {"train_batch_size": size.batch, "optimizer": {"type": "AdamW", "params": adamw}}
    engine = deeptide.initialize(model=net, config={**config, "bf16": {"enabled": dtype == torch.bfloat16}})[0]

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def torch_step(size, dtype, compiled):
    torch.manual_seed(0)
    net = model.GPT(size).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, BETAS, EPSILON, WEIGHT_DECAY, fused=True)
    run = torch.compile(net) if compiled else net

    def step(x, y):
        loss = run(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def flops_of(size):
    """A step's: products with parameters thrice, forward and twice backward, and attention's, whose mask counts."""
    tokens = size.batch * size.context
    weights = size.layers * 12 * size.width**2 + size.width * size.vocabulary
    return 6.0 * weights * tokens + 12.0 * size.layers * size.width * size.context * tokens


def products(size, dtype):
    """A tenth of a step's flops in the block's largest product, forward's shape and both of backward's."""
    x_td = torch.randn(size.batch * size.context, size.width).to(dtype)
    weight_ed = torch.randn(4 * size.width, size.width).to(dtype)
    y_te = torch.randn(size.batch * size.context, 4 * size.width).to(dtype)
    rounds = max(1, round(flops_of(size) * PART_OF_STEP / (6.0 * x_td.numel() * 4 * size.width)))

    def run(_x, _y):
        for _ in range(rounds):
            torch.mm(x_td, weight_ed.t())
            torch.mm(y_te, weight_ed)
            torch.mm(y_te.t(), x_td)
        return 6.0 * rounds * x_td.numel() * 4 * size.width

    return run


PRODUCTS, PART_OF_STEP = "products", 0.1
WAYS = {
    "deeptide, layer's blocks": engine_step,
    "torch, eager": lambda size, dtype: torch_step(size, dtype, False),
    "torch.compile": lambda size, dtype: torch_step(size, dtype, True),
    PRODUCTS: products,
}


def serve(turns, threads, way, size, dtype):
    """One way's process: tells (seconds, loss) of each step that it is asked for; of products, (seconds, flops)."""
    torch.set_num_threads(threads)
    _C.install_cpu_allocator()  # for all alike
    step = WAYS[way](size, dtype)
    while (run := turns.recv()) is not None:
        generator = torch.Generator().manual_seed(run)
        x, y = torch.randint(0, size.vocabulary, (2, size.batch, size.context), generator=generator)
        begin = time.perf_counter()
        loss = step(x, y)
        turns.send((time.perf_counter() - begin, loss))


def by_turns(options, ways, size, dtype):
    """By way: [(seconds, loss)] of its steps, the first of which compiles and fills caches."""
    context, turns, found = multiprocessing.get_context("spawn"), {}, {way: [] for way in ways}
    processes = []
    for way in ways:
        turns[way], other = context.Pipe()
        arguments = (other, options.threads, way, size, dtype)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        other.close()
    for run in range(options.steps + 1):
        for way in ways if run % 2 == 0 else ways[::-1]:
            turns[way].send(run)
            found[way].append(turns[way].recv())
    for way in ways:
        turns[way].send(None)
    for process in processes:
        process.join()
    return found


def measure(options, name, dtype, record):
    size, kind = dataclasses.replace(SIZES[name], batch=options.batch), str(dtype).removeprefix("torch.")
    found = by_turns(options, [way for way in WAYS if options.compile or way != "torch.compile"], size, dtype)
    rates = [flops / taken for taken, flops in found.pop(PRODUCTS)[1:]]
    for way, steps in found.items():
        seconds = [taken for taken, _ in steps[1:]]
        shares = [flops_of(size) / taken / rate for taken, rate in zip(seconds, rates, strict=True)]
        run = {"model": name, "type": kind, "way": way, "seconds": seconds, "rates": rates, "shares": shares}
        record["runs"].append(run)
        words = [f"{100 * share:.1f} %" for share in (min(shares), statistics.median(shares), max(shares))]
        rate = f"{statistics.median(rates) / 1e9:.1f}"
        yield [
            name,
            kind,
            way,
            f"{min(seconds):.3f}",
            f"{statistics.median(seconds):.3f}",
            rate,
            *words,
            f"{steps[-1][1]:.4f}",
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", choices=["46m", "319m"], nargs="+", default=["46m", "319m"])
    parser.add_argument("--types", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--threads", type=int, default=1)
    output.add_arguments(parser, "less-step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record, rows = {**output.new_record(), "runs": []}, []
    for name in options.models:
        for kind in options.types:
            rows += measure(options, name, {"fp32": torch.float32, "bf16": torch.bfloat16}[kind], record)
    about = "Best and median step, the products' median rate, and the step's shares of the rate in its own turn."
    text = output.head("The whole step against products", record, about)
    header = ["model", "type", "way", "best (s)", "median (s)", "products, Gflop/s"]
    header += ["least share", "median share", "most", "last loss"]
    output.write(options, text + "\n" + output.table(header, rows), record)


if __name__ == "__main__":
    main()
