#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's GPT by Adam and by the 1-bit optimizers; prints held-out losses and bytes sent as Markdown.

Each optimizer has the form that its 1-bit form has in its warm-up: without bias correction, with decoupled decay.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import output
from jobs import script

CASES = {
    "Adam": {"type": "Adam", "params": {"bias_correction": False}},
    "OneBitAdam": {"type": "OneBitAdam", "freeze": "freeze_step", "beside": "Adam"},
    "ZeroOneAdam": {"type": "ZeroOneAdam", "freeze": "var_freeze_step", "beside": "Adam"},
    "Lamb": {"type": "Lamb", "params": {"bias_correction": False}},
    "OneBitLamb": {"type": "OneBitLamb", "freeze": "freeze_step", "beside": "Lamb"},
}
LEGEND = """\
The demo's GPT, fp32, stage 0, {ranks} ranks, 8 windows of 128 bytes a step, {steps} steps; the rate warms up to {lr:g}
in a tenth of them and decays as a cosine. Betas {betas}, gradients clipped to {clipping:g} (0: not). The second moment
is frozen after {freeze} steps. Held-out losses in nats per byte; "above" compares the last one with the same seed's of
Adam, or of LAMB. Sent: by a rank in its first and in its last step."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=["Adam", "OneBitAdam"], metavar="OPTIMIZER")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--freeze", type=float, default=0.2, help="the part of the steps that is warm-up")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.95])
    parser.add_argument("--clipping", type=float, default=1.0, help="gradient_clipping; 0: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--deeptide", type=Path, default=output.ROOT / "build", help="build folder")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    output.add_arguments(parser, "bench-convergence")
    return parser.parse_args()


def freeze_step(options):
    return round(options.steps * options.freeze)


def config_of(options):
    case = CASES[options.case]
    params = {"lr": options.lr, "betas": options.betas, "weight_decay": 0.1} | case.get("params", {})
    if "freeze" in case:
        params[case["freeze"]] = freeze_step(options)
    schedule = {
        "total_num_steps": options.steps,
        "warmup_num_steps": options.steps // 10,
        "warmup_type": "linear",
        "cos_min_ratio": 0.05,
    }
    return {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": options.clipping,
        "optimizer": {"type": case["type"], "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
    }


def train(options):
    """One rank's run: {"held_out": {step: loss}, "sent": bytes by step}."""
    sys.path.insert(0, str(output.ROOT / "examples" / "gpt"))
    from gpt import Trainer, use_threads

    use_threads(None)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config_of(options), file)
        file.flush()
        args = {
            "config": file.name,
            "seed": options.seed,
            "data": None,
            "resume": False,
            "steps": options.steps,
            "print_losses": True,
        }
        trainer = Trainer(argparse.Namespace(**args))
    held_out, sent = {}, []
    every = options.steps // options.evaluations
    for step in range(1, options.steps + 1):
        trainer.engine.backward(trainer.model(*trainer.next_batch()))
        sent.append(trainer.engine.step().sent_bytes)
        if step % every == 0:
            held_out[step] = trainer.evaluate()
    if trainer.world.rank == 0:
        options.result.write_text(json.dumps({"held_out": held_out, "sent": sent}))


def run_job(case, seed, options):
    with tempfile.TemporaryDirectory(prefix="deeptide-bench-") as folder:
        result = Path(folder, "result.json")
        given = itertools.chain.from_iterable(
            (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
            for name, value in vars(options).items()
            if name in ("steps", "freeze", "lr", "betas", "clipping", "evaluations")
        )
        launcher = [options.deeptide / "bin" / "deeptide", "--quiet", "--num_ranks", str(options.ranks)]
        case_of_job = ["--case", case, "--seed", str(seed), "--result", result]
        command = [*launcher, "--python", *script("convergence"), *case_of_job, *given]
        subprocess.run(["env", f"PYTHONPATH={options.deeptide.resolve() / 'python'}", *command], check=True)
        return json.loads(result.read_text())


def above(record, case, seed):
    """How far the last loss is above that of the optimizer beside which this one stands; empty without it."""
    beside = record["cases"].get(CASES[case].get("beside"))
    if beside is None:
        return ""
    last = [list(one[str(seed)]["held_out"].values())[-1] for one in (record["cases"][case], beside)]
    return f"{100 * (last[0] / last[1] - 1):+.1f} %"


def markdown(record, options):
    rows, steps = [], []
    for case, seeds in record["cases"].items():
        for seed, one in seeds.items():
            steps, sent = list(one["held_out"]), one["sent"]
            volume = [f"{count / 1e6:.2f}" for count in (sent[0], sent[-1])]
            losses = [f"{loss:.3f}" for loss in one["held_out"].values()]
            rows.append([case, seed, *losses, above(record, case, seed), *volume])
    header = ["optimizer", "seed", *steps, "above", "sent first (MB)", "sent last (MB)"]
    legend = LEGEND.format(**vars(options) | {"freeze": freeze_step(options)})
    return output.head("Convergence of 1-bit optimizers", record, legend) + "\n" + output.table(header, rows)


def main():
    options = parse_arguments()
    if options.case:
        train(options)
        return
    record = output.new_record()
    record["cases"] = {
        case: {str(seed): run_job(case, seed, options) for seed in options.seeds} for case in options.only
    }
    output.write(options, markdown(record, options), record)


if __name__ == "__main__":
    main()
