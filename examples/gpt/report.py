# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Shows and writes down rank 0's view: progress, the losses of every step, the summary. report.cc is its twin."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

QUIET_SECONDS = 10.0  # between lines when nobody watches a terminal
RECENT = 0.9  # weight of the past in the speed shown
RULE = "─" * 78
SAMPLE_WIDTH = 100


@dataclass(frozen=True)
class Run:
    """The facts that stay the same during a run; the first line of losses.jsonl."""

    parameters: int
    ranks: int
    stage: int
    dtype: str
    tokens_per_step: int
    total_steps: int


@dataclass(frozen=True)
class Sample:
    """The text that the model wrote, the prompt included, and how it was asked."""

    prompt: bytes
    temperature: float
    text: bytes

    def record(self, step: int) -> dict[str, object]:
        """The last line of losses.jsonl. What has learned little writes blanks: `nonblank` is the share of the rest."""
        written = printable(self.text[len(self.prompt) :])
        nonblank = sum(not character.isspace() for character in written) / max(1, len(written))
        return {
            "step": step,
            "sample": printable(self.text),
            "prompt": printable(self.prompt),
            "temperature": self.temperature,
            "nonblank": round(nonblank, 3),
        }


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process; "VmHWM": at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def printable(text: bytes) -> str:
    """ASCII and line ends as they are; a model may write any byte, and a terminal obeys some."""
    kept = (chr(byte) if byte == 10 or 32 <= byte < 127 else "?" for byte in text.replace(b"\t", b"    "))
    return "".join(kept)


class Report:
    """Progress on a terminal, else a line now and then; bare losses with `print_losses`. Silent unless rank 0."""

    def __init__(self, run: Run, out: Path, start: int, rank: int, print_losses: bool) -> None:
        self.run, self.out, self.start = run, out, start
        self.shown, self.bare = rank == 0, print_losses
        self.seconds_per_step = 0.0
        self.held_out_losses: list[float] = []
        self.bar = None
        if not self.shown:
            return
        out.mkdir(parents=True, exist_ok=True)
        self._open_losses()
        if sys.stderr.isatty() and not print_losses:
            from tqdm import tqdm

            layout = "{percentage:3.0f}% {bar:10} {n}/{total} | {remaining} left{postfix}"  # 80 columns
            self.bar = tqdm(total=run.total_steps, initial=start, bar_format=layout)
        self.began = self.last_step = self.last_line = time.monotonic()

    def _open_losses(self) -> None:
        """Keeps what an earlier part of this run wrote, up to the checkpoint it goes on from."""
        path, kept = self.out / "losses.jsonl", []
        if self.start and path.exists():
            kept = [line for line in path.read_text().splitlines()[1:] if json.loads(line)["step"] <= self.start]
            self.held_out_losses = [value["held_out"] for value in map(json.loads, kept) if "held_out" in value]
        path.write_text("".join(line + "\n" for line in [json.dumps(asdict(self.run)), *kept]))
        self.losses = path.open("a", buffering=1)

    def step(self, step: int, loss: float, lr: float) -> None:
        if not self.shown:
            return
        now = time.monotonic()
        seconds, self.last_step = now - self.last_step, now
        past = RECENT if self.seconds_per_step else 0.0
        self.seconds_per_step = past * self.seconds_per_step + (1 - past) * seconds
        speed, memory = self.run.tokens_per_step / self.seconds_per_step, resident_bytes()
        record = {"step": step, "loss": loss, "lr": lr, "seconds": round(seconds, 4), "rss_bytes": memory}
        self.losses.write(json.dumps(record) + "\n")
        figures = f"loss {loss:.3f} | {speed:,.0f} tokens/s | {megabytes(memory)}"
        if self.bare:
            print(f"step {step} loss {loss:.8f}", flush=True)
        elif self.bar is not None:
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update()
        elif now - self.last_line > QUIET_SECONDS or step == self.start + 1:
            left = duration((self.run.total_steps - step) * self.seconds_per_step)
            print(f"step {step}/{self.run.total_steps} | {figures} | {left} left", flush=True)
            self.last_line = now

    def held_out(self, step: int, loss: float) -> None:
        if not self.shown:
            return
        self.losses.write(json.dumps({"step": step, "held_out": loss}) + "\n")
        self.held_out_losses.append(loss)
        self.say(f"step {step} held_out {loss:.8f}" if self.bare else f"step {step}: held-out loss {loss:.3f}")
        self.last_step = time.monotonic()  # an evaluation is no part of a step's time

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif self.shown:
            print(text, flush=True)

    def end_of_training(self, step: int) -> None:
        if self.shown:
            self.steps_done = step - self.start
            self.seconds = time.monotonic() - self.began
            if self.bar is not None:
                self.bar.close()

    def summary(self, sample: Sample, memory: list, checkpoint: str) -> None:
        """Prints the page that one would show a friend."""
        if not self.shown:
            return
        self.losses.write(json.dumps(sample.record(self.start + self.steps_done)) + "\n")
        run, steps = self.run, self.steps_done
        speed = steps * run.tokens_per_step / self.seconds
        print(RULE)
        million = run.parameters / 1e6
        print(f"A GPT with {million:.1f} M parameters: {run.ranks} ranks, ZeRO stage {run.stage}, {run.dtype}")
        print(f"{steps} steps in {duration(self.seconds)} (min:s), {speed:,.0f} tokens/s with evaluation and saving")
        if self.start + steps < run.total_steps:
            print(f"Its time was up before step {run.total_steps}: RESUME=1 (--resume) goes on, and it writes better")
        before, after = self.held_out_losses[0], self.held_out_losses[-1]
        print(f"\nHeld-out loss: {before:.3f} before, {after:.3f} after (nats per byte; pure guessing is 5.545)")
        print(
            f'\nPrompted with "{printable(sample.prompt).strip()}", at temperature {sample.temperature:g}, it writes:\n'
            + "\n".join("  | " + line[:SAMPLE_WIDTH] for line in lines_of(sample.text))
        )
        print("\n" + memory_table(memory))
        print(f"peak memory of this process (torch, Python and data included): {megabytes(resident_bytes('VmHWM'))}")
        print(f"\nLoss curve:  {self._draw()}")
        print(f"Losses:      {self.out / 'losses.jsonl'}")
        print(f"Checkpoint:  {checkpoint}")
        print(RULE, flush=True)

    def _draw(self) -> str:
        try:
            import plot

            return str(plot.draw(self.out))
        except ImportError as error:
            return f"not drawn, {error.name} is missing: pip install {error.name}, then python plot.py {self.out}"


def lines_of(text: bytes) -> list[str]:
    """Without the empty lines at both ends; a small model now and then writes a line of blanks."""
    return printable(text).rstrip().lstrip("\n").splitlines()


def memory_table(lines: list) -> str:
    """Bytes on one rank by role, as the engine predicted and as it measured them."""
    rows = [("bytes per rank", "predicted", "measured")]
    rows += [(line.role, megabytes(line.predicted_bytes), megabytes(line.measured_bytes)) for line in lines]
    return "\n".join(f"{role:<20}{predicted:>14}{measured:>14}" for role, predicted, measured in rows)
