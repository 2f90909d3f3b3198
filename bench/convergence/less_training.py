# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""How long a GPT trains until a held-out loss, with all of the work and with less: a Markdown table.

Each way trains anew from the same weights over the same batches of a text, in turns; the time of evaluations does not
count. The text is the demo's, Python's standard library; --text names another file. --seeds: so many runs of each way,
whose target is what all of the work reaches with the same seed; the table has medians, and how many met the target.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

import deeptide
import torch
from deeptide.efficiency import convert_to_random_ltd, drop_layers

import model
import output
from settings import BETAS, EPSILON, SIZES


class Cut(model.GPT):
    """A GPT whose forward cuts its input to the curriculum's length."""

    def forward(self, x_bt, y_bt, curriculum_seqlen=None):
        length = curriculum_seqlen or x_bt.shape[1]
        return super().forward(x_bt[:, :length], y_bt[:, :length])


def text_of(path):
    if path is not None:
        return path.read_bytes()
    sys.path.insert(0, str(output.ROOT / "examples" / "gpt"))
    from corpus import read_text, standard_library

    return read_text(standard_library())


class Corpus:
    """Bytes as tokens; the last tenth is held out."""

    def __init__(self, options):
        data = torch.frombuffer(bytearray(text_of(options.text)), dtype=torch.uint8)
        cut = len(data) - len(data) // 10
        self.seen, self.held_out, self.options = data[:cut], data[cut:], options

    def batch(self, data, seed):
        length, generator = self.options.context, torch.Generator().manual_seed(seed)
        begins = torch.randint(0, len(data) - length - 1, (self.options.batch,), generator=generator)
        rows = torch.stack([data[b : b + length + 1] for b in begins]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def sections(options):
    """By way: what the configuration says."""
    steps, context, layers = options.steps, options.context, options.layers
    schedule = {"total_curriculum_step": max(steps // 2, 1), "difficulty_step": 8}
    routing = {
        "enabled": True,
        "total_layer_num": layers,
        "random_ltd_layer_num": layers - 2,
        "random_ltd_layer_id": list(range(1, layers - 1)),
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": context // 4,
            "max_value": context,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": max(steps // 2, 1), "seq_per_step": 8},
        },
    }
    return {
        "all of it": {},
        "curriculum": {
            "curriculum_learning": {
                "enabled": True,
                "min_difficulty": max(context // 8, 8),
                "max_difficulty": context,
                "schedule_type": "fixed_linear",
                "schedule_config": schedule,
            }
        },
        "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 4.0 / max(steps, 1)}},
        "random-LTD": {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": routing}}},
    }


def start(options, section, seed):
    torch.manual_seed(1 + seed)
    size = dataclasses.replace(
        SIZES["46m"], vocabulary=256, context=options.context, width=options.width, layers=options.layers, heads=4
    )
    net = (Cut if "curriculum_learning" in section else model.GPT)(size)
    adamw = {"type": "AdamW", "params": {"lr": options.rate, "betas": BETAS, "eps": EPSILON, "weight_decay": 0.1}}
    config = {"train_batch_size": options.batch, "optimizer": adamw, "gradient_clipping": 1.0, **section}
    engine = deeptide.initialize(model=net, config=config)[0]
    if "progressive_layer_drop" in section:
        drop_layers(engine, net.blocks)
    if "data_efficiency" in section:
        convert_to_random_ltd(engine, model.Block)
    return engine


def held_out_loss(engine, corpus, options):
    engine.eval()
    with torch.no_grad():
        losses = [engine(*corpus.batch(corpus.held_out, 10_000 + i)).item() for i in range(options.evaluations)]
    engine.train()
    return sum(losses) / len(losses)


def train(options, corpus, section, seed):
    """[(step, seconds, held-out loss)]."""
    engine, spent, curve = start(options, section, seed), 0.0, []
    for step in range(options.steps):
        batch = corpus.batch(corpus.seen, 1_000_000 * seed + step)
        begin = time.perf_counter()
        engine.backward(engine(*batch))
        engine.step()
        spent += time.perf_counter() - begin
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            curve.append((step + 1, spent, held_out_loss(engine, corpus, options)))
    engine.destroy()
    return curve


def reached(curve, target):
    """(step, seconds) at which a run met the target; None: it did not."""
    return next(((step, s) for step, s, loss in curve if loss <= target and math.isfinite(loss)), None)


def row_of(name, curves, targets):
    """One way's line: medians over its seeds."""
    met = [point for curve, target in zip(curves, targets) if (point := reached(curve, target))]
    step, seconds = (f"{statistics.median(column):.1f}" for column in zip(*met)) if met else ("-", "-")
    last = [curve[-1] for curve in curves]
    losses = [loss for _, _, loss in last]
    whole = statistics.median(seconds for _, seconds, _ in last)
    spread = f"{statistics.median(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
    return [name, f"{len(met)} of {len(curves)}", step, seconds, f"{whole:.1f}", spread]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--evaluations", type=int, default=8, help="batches of one")
    parser.add_argument("--target", type=float, help="held-out loss; by default what all of the work reaches at last")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each way, in turns")
    parser.add_argument("--threads", type=int, default=1)
    output.add_arguments(parser, "less-training")
    options = parser.parse_args()
    record = output.new_record()
    torch.set_num_threads(options.threads)
    corpus = Corpus(options)
    curves = {name: [] for name in sections(options)}
    for seed in range(options.seeds):
        for name, section in sections(options).items():
            curves[name].append(train(options, corpus, section, seed))
    targets = [options.target or curve[-1][2] for curve in curves["all of it"]]
    record.update(targets=targets, curves=curves)
    rows = [row_of(name, runs, targets) for name, runs in curves.items()]
    header = ["way", "target met", "steps to it", "seconds to it", "seconds for all steps", "last held-out loss"]
    text = output.head("Training with less work", record, "Seconds of steps alone, evaluations left out.")
    output.write(options, text + "\n" + output.table(header, rows), record)


if __name__ == "__main__":
    main()
