# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT with Deeptide: `deeptide --num_ranks 2 examples/gpt/gpt.py`. gpt.cc is its twin."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

import deeptide
from corpus import load_corpus
from model import GPT
from report import Report, Run, Sample
from stop import INTERRUPTED, StopRequest

PROMPT, TEMPERATURE = b"\n    def ", 0.5  # of the sample at the end: likely bytes, and not only the likeliest
EXIT_INTERRUPTED = 130  # what a shell expects of a program that ^C ended


def parse_arguments() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(here / "ds_config.json"), help="ds_config.json")
    parser.add_argument("--data", help="a file or folder of text (default: the source of Python's standard library)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for losses, curve and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's total_num_steps)")
    parser.add_argument("--minutes", type=float, help="stop early after this time")
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of each rank (default: its share of the cores)")
    parser.add_argument("--print-losses", action="store_true", help="one line per step for other programs, no summary")
    return parser.parse_args()


def use_threads(threads: int | None) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // ranks_here))


class Trainer:
    """A model, its engine and its data."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = deeptide.Config.from_file(args.config)
        if not args.print_losses:  # `deeptide report` reads what this records
            record = {"enabled": True, "output_path": str(args.out.parent), "job_name": args.out.name}
            self.config = self.config.merged(json.dumps({"deeptide": {"jsonl_monitor": record}}))
        self.model = GPT(seed=args.seed)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.engine, *_ = deeptide.initialize(model=self.model, config=self.config)
        self.world = self.engine.world
        self.batch = self.config.batch_sizes(self.world.size)
        self.world_batch = self.batch.micro * self.world.size
        self.train, self.held_out = load_corpus(args.data, self.model.config.context)
        self.sampler = deeptide.DistributedSampler(
            len(self.train),
            batch_size=self.batch.micro,
            rank=self.world.rank,
            world_size=self.world.size,
            shuffle=True,
            drop_last=True,
            seed=args.seed,
        )
        self.total = int(self.config.scheduler.params["total_num_steps"]) if args.steps is None else args.steps
        self.start = 0
        self.checkpoint = "none"
        if args.resume:
            self.resume()

    def resume(self) -> None:
        """Model, optimizer, schedule and data position of the newest checkpoint, if there is one."""
        path, state = self.engine.load_checkpoint(self.args.out / "checkpoints")
        if path is not None:
            self.start, self.checkpoint = state["step"], path
            self.sampler.set_position(state["epoch"], state["samples"] // self.world_batch)

    def save(self, step: int) -> None:
        epoch, batch = self.sampler.position()
        # In samples of the whole world: it holds for another number of ranks too.
        state = {"step": step, "epoch": epoch, "samples": batch * self.world_batch}
        self.checkpoint = self.engine.save_checkpoint(
            self.args.out / "checkpoints", tag=f"step_{step}", client_state=state
        )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        indices = self.sampler.next() or self.sampler.next()  # empty once, at an epoch's end
        return self.train.batch(indices, self.engine.device)

    @torch.no_grad()
    def evaluate(self, batches: int = 4, size: int = 16) -> float:
        """The mean loss on windows spread evenly over the held-out text: the same on every rank."""
        count = min(batches * size, len(self.held_out))
        total = 0.0
        for first in range(0, count, size):
            windows = [i * len(self.held_out) // count for i in range(first, min(first + size, count))]
            total += self.model(*self.held_out.batch(windows, self.engine.device)).item() * len(windows)
        return total / count

    def run(self, report: Report) -> bool:
        """Trains to the end; returns false if ^C came first."""
        step, stopped = self.start, False
        with StopRequest(self.world.store, self.args.minutes) as stop:
            while step < self.total and not stopped:
                step += 1
                stop.before_step(step)
                for _ in range(self.batch.accumulation):
                    tokens, targets = self.next_batch()
                    loss = self.model(tokens, targets)
                    self.engine.backward(loss)
                    outcome = self.engine.step()
                report.step(step, loss.item(), outcome.lr)
                stopped = stop.agreed(step)
                last = stopped or step == self.total
                if last or step % self.args.eval_every == 0:
                    report.held_out(step, self.evaluate())
                if last or step % self.args.save_every == 0:
                    self.save(step)
        report.end_of_training(step)
        return stop.reason != INTERRUPTED

    def describe(self) -> Run:
        return Run(
            parameters=self.parameters,
            ranks=self.world.size,
            stage=self.config.zero.stage,
            dtype=self.config.compute_dtype().name,
            tokens_per_step=self.batch.train * self.model.config.context,
            total_steps=self.total,
        )


def main() -> int:
    args = parse_arguments()
    use_threads(args.threads)
    trainer = Trainer(args)
    report = Report(trainer.describe(), args.out, trainer.start, trainer.world.rank, args.print_losses)
    if trainer.start:
        report.say(f"resumed from {trainer.checkpoint}")
    else:
        report.held_out(0, trainer.evaluate())
    if not trainer.run(report):
        report.say(f"Stopped; nothing is lost, it is all in {trainer.checkpoint}. Go on with RESUME=1 (--resume).")
        return EXIT_INTERRUPTED
    if not args.print_losses:
        text = trainer.model.generate(PROMPT, 400, TEMPERATURE)
        report.summary(Sample(PROMPT, TEMPERATURE, text), trainer.engine.memory(), trainer.checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())
