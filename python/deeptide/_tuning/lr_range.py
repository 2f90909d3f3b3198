# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of `deeptide lr-range`: runs a training script, whose learning rate grows with every step.

The script's first engine takes the test; the script ends at its last step, when rank 0 writes losses and picture.
Source: Smith, arXiv:1506.01186, sec. 3.3.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deeptide._C import ConfigError, World
from deeptide._engine import initialize as _initialize
from deeptide._tuning.run_script import run_script
from deeptide.engine import Engine

_ROWS = 16  # of the table that rank 0 prints


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min-lr", type=float, required=True)
    parser.add_argument("--max-lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as-module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _smooth(values: list[float]) -> list[float]:
    """The mean over each value's neighbourhood, a fifteenth of the test wide."""
    reach = max(len(values) // 30, 1)
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


@dataclass
class RangeTest:
    """The rates of the test, and the losses that belong to them."""

    min_lr: float
    max_lr: float
    steps: int
    linear: bool
    out: Path
    losses: list[float] = field(default_factory=list)
    world: World | None = None
    finished: bool = False
    _in_step: list[torch.Tensor] = field(default_factory=list)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        part = step / (self.steps - 1)
        if self.linear:
            return self.min_lr + (self.max_lr - self.min_lr) * part
        return self.min_lr * math.exp(part * math.log(self.max_lr / self.min_lr))

    def engine_kind(self, kind: type[Engine]) -> type[Engine]:
        """A class of engine that takes this test; the script's further engines train as ever."""
        _initialize.range_test = None
        return type(kind.__name__, (_Tested, kind), {"_range_test": self})

    def add_loss(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's loss, over the accumulated steps."""
        self._in_step.append(loss.detach().float().reshape(()))

    def begin_step(self, engine: Engine) -> None:
        """Sets the step's rate in all groups. Errors: ConfigError where there is nothing to test."""
        self.world = engine.world
        if engine.optimizer is None:
            raise ConfigError('deeptide lr-range: the engine has no optimizer; add an "optimizer" section or give one')
        if not self._in_step:
            raise ConfigError(
                "deeptide lr-range: step() came without a loss; call engine.backward(loss) in place of loss.backward()"
            )
        for group in engine.optimizer.param_groups:
            group["lr"] = self.rate(len(self.losses))

    def end_step(self) -> None:
        """Notes the step's loss; ends the script after the last one."""
        self.losses.append(torch.stack(self._in_step).sum().item())
        self._in_step.clear()
        if len(self.losses) == self.steps:
            self.finish()
            raise SystemExit(0)

    def finish(self) -> None:
        """Writes the ranks' mean losses and what they say, on rank 0. Collective."""
        self.finished = True
        if self.world is None:
            raise ConfigError("deeptide lr-range: the script took no step of an engine")
        losses = _mean_over_ranks(self.losses, self.world)
        if self.world.rank == 0:
            _report([self.rate(step) for step in range(len(losses))], losses, self)


class _Tested(Engine):
    """An engine that takes the test of its class."""

    _range_test: RangeTest

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = super().backward(loss, *args, **kwargs)
        self._range_test.add_loss(value)
        return value

    def _step(self, take: Any, lr_kwargs: dict[str, Any] | None) -> Any:
        if not self.is_gradient_accumulation_boundary():
            return super()._step(take, lr_kwargs)
        self._range_test.begin_step(self)
        outcome = super()._step(take, lr_kwargs)
        self._range_test.end_step()
        return outcome


def _mean_over_ranks(losses: list[float], world: World) -> list[float]:
    if world.size == 1:
        return losses
    world.store.set(f"lr_range/losses/{world.rank}", json.dumps(losses))
    rows = [json.loads(world.store.get(f"lr_range/losses/{rank}")) for rank in range(world.size)]
    world.store.set(f"lr_range/read/{world.rank}", "")
    if world.rank == 0:  # which may hold the store
        world.store.wait([f"lr_range/read/{rank}" for rank in range(world.size)])
    return [sum(values) / world.size for values in zip(*rows, strict=True)]


def fastest_fall(rates: list[float], losses: list[float]) -> int | None:
    """The index at which the smoothed loss falls fastest per factor of the rate, before its minimum.

    None where it does not fall. Only what comes before the first loss that is not finite counts.
    """
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    smooth = _smooth(losses[:finite])
    if not smooth:
        return None
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    slopes = {
        i: (smooth[i + 1] - smooth[i - 1]) / math.log(rates[i + 1] / rates[i - 1])
        for i in range(1, min(lowest, len(smooth) - 1))
    }
    best = min(slopes, key=slopes.__getitem__, default=None)
    return best if best is not None and slopes[best] < 0 else None


def _report(rates: list[float], losses: list[float], test: RangeTest) -> None:
    test.out.mkdir(parents=True, exist_ok=True)
    rows = [{"step": i + 1, "lr": lr, "loss": loss} for i, (lr, loss) in enumerate(zip(rates, losses, strict=True))]
    (test.out / "lr_range.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = fastest_fall(rates, losses)
    print(f"\n{'lr':>12}{'loss':>12}")
    for i in sorted({round(row * (len(rows) - 1) / (_ROWS - 1)) for row in range(_ROWS)}):
        print(f"{rates[i]:>12.3g}{losses[i]:>12.5g}")
    if len(losses) < test.steps:
        print(f"The script ended after {len(losses)} of {test.steps} steps: lower --steps, or let it train longer.")
    if best is None:
        print("The loss does not fall in this range: try others, or more steps.")
    else:
        print(f"The loss falls fastest at a learning rate of about {rates[best]:.2g}.")
    print(f"Losses:  {test.out / 'lr_range.jsonl'}\nCurve:   {_draw(rates, losses, best, test)}", flush=True)


def _draw(rates: list[float], losses: list[float], best: int | None, test: RangeTest) -> str:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return "not drawn, matplotlib is missing: pip install matplotlib"
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(rates, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(rates, _smooth(losses), color="tab:blue", label="loss, smoothed (pale: every step)")
    if best is not None:
        axes.axvline(rates[best], color="tab:orange", label=f"falls fastest: {rates[best]:.2g}")
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:  # what comes after a divergence would flatten the rest
        low, first = min(finite), finite[0]
        axes.set_ylim(low - 0.1 * (first - low) - 1e-3, first + 0.5 * (first - low) + 1e-3)
    axes.set_xscale("linear" if test.linear else "log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = test.out / "lr_range.png"
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
    return str(picture)


def main() -> None:
    """Runs the script under the test; the words of the command line are the launcher's."""
    options = _parse_arguments()
    test = RangeTest(options.min_lr, options.max_lr, options.steps, options.linear, options.out)
    _initialize.range_test = test
    run_script(options.script, options.arguments, options.as_module)
    if not test.finished:
        test.finish()


if __name__ == "__main__":
    main()
