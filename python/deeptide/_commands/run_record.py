# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the record that "deeptide.jsonl_monitor" leaves of a run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

# The forecast's roles, by what the names of the ledger's begin with.
_ROLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "gathered peak": "gathered",
    "communication": "communication",
}


class Run:
    """A run's lines; a resumed run has several starts, of which the last counts, and each step once."""

    def __init__(self, path: str | Path) -> None:
        """`path`: run.jsonl, or its folder. Errors: FileNotFoundError, ValueError on a file that is no record."""
        path = Path(path)
        file = path / "run.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"'{file}' does not exist: a run leaves it with "
                '"deeptide": {"jsonl_monitor": {"enabled": true, "output_path": …, "job_name": …}}'
            )
        self.name = file.parent.name if file.name == "run.jsonl" else file.stem
        self.start: dict[str, Any] = {}
        by_step: dict[int, dict[str, Any]] = {}
        texts = file.read_text().splitlines()
        for at, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
                kind = line["kind"]
            except (ValueError, KeyError, TypeError) as error:
                if at == len(texts):
                    break  # a run that was killed while it wrote
                raise ValueError(f"'{file}', line {at}: not a line of a run's record: {error}") from error
            if kind == "start":
                self.start = line
            elif kind == "step":
                by_step[line["step"]] = line
        self.steps = [by_step[step] for step in sorted(by_step)]
        self.skipped = sum(not line["applied"] for line in self.steps)
        self._add_rates()

    def _add_rates(self) -> None:
        """From the time between two neighbours' ends; none after a restart."""
        for before, line in zip(self.steps, self.steps[1:], strict=False):
            seconds = line["wall_s"] - before["wall_s"]
            if line["step"] != before["step"] + 1 or seconds <= 0:
                continue
            line["samples_per_s"] = (line["samples"] - before["samples"]) / seconds
            if line["tokens"]:
                line["tokens_per_s"] = line["tokens"] / seconds

    def _median(self, key: str) -> float | None:
        values = [line[key] for line in self.steps if key in line]
        return median(values) if values else None

    def samples_per_s(self) -> float | None:
        """The median over steps."""
        return self._median("samples_per_s")

    def tokens_per_s(self) -> float | None:
        """The median over steps; None where the program told no tokens."""
        return self._median("tokens_per_s")

    def step_s(self) -> float:
        """The median time of a step."""
        totals = [line["times"]["total"] for line in self.steps if line["times"]["total"] > 0]
        return median(totals) if totals else 0.0

    def last(self, key: str) -> float | None:
        """The last value that is one."""
        return next((line[key] for line in reversed(self.steps) if line.get(key) is not None), None)

    @property
    def limit(self) -> str:
        """The last line that says what limits a step."""
        return next((line["limit"] for line in reversed(self.steps) if line.get("limit")), "")

    @property
    def ranks(self) -> list[dict[str, float]]:
        """Each rank's mean times, of the last such line."""
        return next((line["ranks"] for line in reversed(self.steps) if line.get("ranks")), [])

    def memory(self) -> list[tuple[str, int, int]]:
        """(role, most bytes taken, forecast) of the roles that have any."""
        if not self.steps:
            return []
        taken = self.steps[-1].get("memory", {})
        rows = []
        for role, beginning in _ROLES.items():
            peak = sum(most for name, (_, most) in taken.items() if name.startswith(beginning))
            forecast = self.start.get("forecast", {}).get(role, 0)
            if peak or forecast:
                rows.append((role, peak, forecast))
        return rows
