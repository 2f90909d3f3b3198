# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curve of a run, of gpt.py or of gpt: `python plot.py runs/demo` writes runs/demo/loss.png."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def smooth(values: list[float]) -> list[float]:
    """The mean over each value's neighbourhood, a thirtieth of the run wide."""
    reach = len(values) // 60
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw(folder: Path) -> Path:
    """From losses.jsonl in `folder`; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run, *lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held_out = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        steps, losses = zip(*train)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(list(losses)), color="tab:blue", label="train (pale: every step)")
    if held_out:
        axes.plot(*zip(*held_out), color="tab:orange", marker="o", label="held out")
        last_step, last_loss = held_out[-1]
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{last_loss:.2f}", (last_step, last_loss), **above)
    axes.set_xlabel(f"step ({run['tokens_per_step']:,} bytes each)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(
        f"Byte-level GPT, {run['parameters'] / 1e6:.1f} M parameters: "
        f"{run['ranks']} rank{'s' if run['ranks'] > 1 else ''}, ZeRO stage {run['stage']}, {run['dtype']}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    picture = folder / "loss.png"
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what --out was")
    print(draw(parser.parse_args().folder))
