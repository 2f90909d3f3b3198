# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The search of `deeptide tune`: which configuration is measured next, and why another one is not.

Stages and placements come first, then micro-batches of the fastest, recomputation, the mesh, and buckets. Each phase
starts from the fastest so far, and takes what differs from it by one thing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

GAIN = 0.02  # a smaller difference between short runs is noise
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Batch:
    """A rank's batch of one step."""

    micro: int
    accumulation: int

    def patch(self, world: int) -> dict[str, int]:
        """The keys of a configuration."""
        return {
            "train_batch_size": self.micro * self.accumulation * world,
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
        }

    def __str__(self) -> str:
        return f"{self.micro} x {self.accumulation}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A stage with a placement, and what the plan says of it."""

    name: str
    patch: dict[str, Any]
    bytes: dict[str, int]
    why_not: str = ""  # the plan's: the disks are full
    shared: int = 1  # ranks that have one replica together, along the axes of pipeline and tensor


@dataclasses.dataclass
class Attempt:
    """A row of the table."""

    setting: Setting
    batch: Batch
    more: dict[str, Any]  # of "zero_optimization", beside the setting's
    why: str
    outcome: str = ""  # why it has no result
    result: dict[str, Any] | None = None
    recomputes: bool | None = None  # activations; None: as the script has it

    @property
    def name(self) -> str:
        """For people."""
        words = [self.setting.name, *(f"{key} {value}" for key, value in self.more.items())]
        if self.recomputes is not None:
            words.append("recomputing" if self.recomputes else "without recomputing")
        return ", ".join(words)

    def patch(self, world: int) -> dict[str, Any]:
        """The changes to the script's configuration."""
        num_batches = max(world // self.setting.shared, 1)
        patch: dict[str, Any] = self.batch.patch(num_batches) | json.loads(json.dumps(self.setting.patch))
        if self.more:
            patch.setdefault("zero_optimization", {}).update(self.more)
        return patch


class EnoughError(Exception):
    """The search has used what it may."""


Measure = Callable[[Attempt], dict[str, Any]]


def settings_of(survey: dict[str, Any]) -> tuple[Setting, list[Setting]]:
    """The script's own setting, and the others from the fastest to the smallest."""
    zero = survey["config"].get("zero_optimization", {})
    placed = any(zero.get(key) for key in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"))
    placed = placed or bool(survey["config"].get("deeptide", {}).get("placement"))
    own_name = f"stage {survey['stage']}" + (", placed as it is" if placed else "")
    shared = survey.get("shared", 1)
    own = Setting(own_name, {}, survey["bytes"], shared=shared)
    others = []
    for choice in survey["choices"]:
        if choice["name"] == own_name:
            continue
        patch = choice["sections"]
        patch["zero_optimization"] = {"offload_optimizer": None, "offload_param": None} | patch["zero_optimization"]
        patch.setdefault("deeptide", {}).setdefault("placement", None)
        others.append(Setting(choice["name"], patch, choice["bytes"], choice["why_not"], shared))
    return own, others


class Search:
    """Decides; `measure` runs an attempt and returns its result, or {"error": text}."""

    def __init__(self, survey: dict[str, Any], memory_bytes: int, measure: Measure) -> None:
        self.survey, self.wanted = survey, survey["autotuning"]
        self.rows: list[Attempt] = []
        self.best: Attempt | None = None
        self.end = ""  # why the search ended before its time
        self._memory_bytes, self._measure = memory_bytes, measure
        self._own, self._others = settings_of(survey)
        self._batch = Batch(*survey["batch"][1:])
        self._num_measured = self._without_gain = 0
        self._stopped_by_memory: Batch | None = None
        self._beyond: Batch | None = None  # the micro-batch for which the memory does not do

    def run(self) -> Attempt | None:
        """The fastest attempt; None if nothing ran."""
        try:
            phases = (self._try_settings, self._try_batches, self._try_recomputation, self._try_meshes)
            for phase in (*phases, self._try_buckets):
                self._without_gain = 0
                phase()
        except EnoughError as enough:
            self.end = str(enough)
        return self.best

    # -- phases -------------------------------------------------------------------------------------------------

    def _try_settings(self) -> None:
        self._try(self._own, self._batch, "the configuration as it is")
        for setting in self._others:
            in_files = setting.bytes["files"] > 0
            if in_files and self.best is not None and self.best.setting.bytes["files"] == 0:
                self._pass_over(setting, "without files it fits, and files are slower")
            elif not in_files and self.survey["world"] == 1 and self._own.bytes["files"] == 0:
                self._pass_over(setting, "one rank has nothing to shard")
            else:
                self._try(setting, self._batch, "another stage or placement")

    def _try_batches(self) -> None:
        """Upwards from the fastest, or else downwards; with a smaller setting where memory ends the way."""
        if self.best is None:
            return
        before = self.best
        self._climb(self._larger, "fewer, larger micro-batches")
        if (stopped := self._stopped_by_memory) is not None:
            self._beyond = stopped
            self._try_smaller_settings(stopped)
        if self.best is before:
            self._climb(self._smaller, "smaller micro-batches")

    def _try_smaller_settings(self, batch: Batch) -> None:
        best = self._the_best()
        for setting in (self._own, *self._others):
            if setting.bytes["host"] >= best.setting.bytes["host"] or setting.bytes["files"] > 0:
                continue
            if self._try(setting, batch, "leaves memory for this micro-batch"):
                self._climb(self._larger, "fewer, larger micro-batches")
                return

    def _try_recomputation(self) -> None:
        """Off where the script has it on; on where memory has ended the way to larger micro-batches."""
        now = self.survey.get("recomputes")
        if now is None:
            return
        if self.best is None and not now:
            self._try(self._own, self._batch, "recomputes activations, which take less memory then", None, True)
        elif self.best is not None and now:
            if self._try(self.best.setting, self.best.batch, "keeps activations", self.best.more, False):
                self._climb(self._larger, "fewer, larger micro-batches")
        elif self.best is not None and self._beyond is not None and self._beyond.micro > self.best.batch.micro:
            why = "recomputes activations, which leaves memory for this micro-batch"
            if self._try(self.best.setting, self._beyond, why, self.best.more, True):
                self._climb(self._larger, "fewer, larger micro-batches")

    def _try_meshes(self) -> None:
        """The same global batch on fewer replicas, each cut over several ranks; then larger micro-batches."""
        base = self.best or Attempt(self._own, self._batch, {}, "")

        def bytes_of(size: int) -> dict[str, int]:
            """A run shows what a cut model takes where nothing fits; else what fits uncut fits."""
            return base.setting.bytes if self.best else {key: n // size for key, n in base.setting.bytes.items()}

        by_calls = base.result is not None and not base.result.get("train_batch", False)
        for mesh in self.survey.get("meshes", []):
            axis, size = mesh["axis"], mesh["size"]
            why_not = mesh["why_not"]
            if axis == "pipeline" and by_calls and not why_not:
                why_not = "a pipeline trains by train_batch(), and the script calls forward, backward and step itself"
            setting = Setting(
                f"{base.setting.name}, {axis} {size}",
                base.setting.patch | {"parallel": {axis: size}},
                bytes_of(size),
                why_not,
                size,
            )
            batch = Batch(base.batch.micro, base.batch.accumulation * size)
            why = "stages in turns" if axis == "pipeline" else "layers cut over ranks"
            if self._try(setting, batch, why, base.more, base.recomputes):
                self._climb(self._larger, "fewer, larger micro-batches")

    def _try_buckets(self) -> None:
        if self.best is None or self.wanted["fast"] or self.survey["world"] == 1:
            return
        zero = self.survey["config"].get("zero_optimization", {})
        for key, default, why in (
            ("reduce_bucket_size", 500_000_000, "gradients leave in parts, beside backward"),
            ("allgather_bucket_size", 500_000_000, "updated parameters arrive in parts"),
            ("stage3_prefetch_bucket_size", 50_000_000, "more or less is gathered ahead"),
        ):
            if key.startswith("stage3") and self._stage_of(self.best) != 3:
                continue
            now = int(zero.get(key, default))
            elements = int(self.survey["parameters"])
            for value in sorted({elements // 2, elements // 8, elements} - {now}):
                if value > 0 and not value >= now >= elements:  # both hold all there is
                    best = self.best
                    self._try(best.setting, best.batch, why, best.more | {key: value}, best.recomputes)

    # -- micro-batches ------------------------------------------------------------------------------------------

    def _climb(self, following: Callable[[Batch], Batch | None], why: str) -> None:
        self._stopped_by_memory = None
        for _ in range(self.wanted["num_tuning_micro_batch_sizes"]):
            best = self._the_best()
            batch = following(best.batch)
            if batch is None or not self._try(best.setting, batch, why, best.more, best.recomputes):
                return

    def _larger(self, batch: Batch) -> Batch | None:
        most = self.wanted["max_train_micro_batch_size_per_gpu"]
        return next((b for b in self._batches(batch) if batch.micro * 2 <= b.micro <= most), None)

    def _smaller(self, batch: Batch) -> Batch | None:
        least = self.wanted["min_train_micro_batch_size_per_gpu"]
        return next((b for b in reversed(list(self._batches(batch))) if least <= b.micro <= batch.micro // 2), None)

    def _batches(self, batch: Batch) -> Iterator[Batch]:
        """Those of the same global batch, or within its bounds with the same accumulation; by micro-batch."""
        world, most = self.survey["world"], self.wanted["max_train_batch_size"]
        if most is None:
            whole = batch.micro * batch.accumulation
            yield from (Batch(m, whole // m) for m in range(1, whole + 1) if whole % m == 0)
            return
        each = max(world // (self.best.setting if self.best else self._own).shared, 1) * batch.accumulation
        first = -(-self.wanted["min_train_batch_size"] // each)
        yield from (Batch(m, batch.accumulation) for m in range(max(first, 1), most // each + 1))

    # -- attempts -----------------------------------------------------------------------------------------------

    def _pass_over(self, setting: Setting, outcome: str) -> None:
        self.rows.append(Attempt(setting, self._batch, {}, "", f"not run: {outcome}"))

    def _try(
        self,
        setting: Setting,
        batch: Batch,
        why: str,
        more: dict[str, Any] | None = None,
        recomputes: bool | None = None,
    ) -> bool:
        """Whether it is the fastest so far. Errors: EnoughError."""
        attempt = Attempt(setting, batch, more or {}, why, recomputes=recomputes)
        if any(row.patch(1) == attempt.patch(1) and row.recomputes == recomputes for row in self.rows):
            return False
        self.rows.append(attempt)
        if reason := self._why_not(attempt):
            attempt.outcome = f"not run: {reason}"
            return False
        if self._num_measured >= self.wanted["tuner_num_trials"]:
            attempt.outcome = "not run"
            raise EnoughError(f'{self._num_measured} runs were made, as many as "tuner_num_trials" allows')
        self._num_measured += 1
        return self._take(attempt, self._measure(attempt))

    def _take(self, attempt: Attempt, result: dict[str, Any]) -> bool:
        if "error" in result:
            attempt.outcome = f"failed: {result['error']}"
            self._stopped_by_memory = attempt.batch
        else:
            attempt.result = result
            if not result["follows"]:
                attempt.outcome = (
                    f"the script takes {result['samples']} samples per step whatever the micro-batch is: name its "
                    'argument in "arg_mappings"'
                )
        gained = "error" not in result and result["follows"] and self._is_faster(attempt)
        if "error" not in result and self.best is None:
            gained = True
        if gained:
            self.best, self._without_gain = attempt, 0
            return True
        self._without_gain += 1
        if self._without_gain >= self.wanted["tuner_early_stopping"]:
            raise EnoughError(f'{self._without_gain} runs in a row brought nothing: "tuner_early_stopping"')
        return False

    def _is_faster(self, attempt: Attempt) -> bool:
        return self.best is None or self.score(attempt) > self.score(self.best) * (1 + GAIN)

    def score(self, attempt: Attempt) -> float:
        """More is better."""
        assert attempt.result is not None
        latency = self.wanted["metric"] == "latency"
        return 1 / attempt.result["step_s"] if latency else float(attempt.result["samples_per_s"])

    def _why_not(self, attempt: Attempt) -> str:
        """The reason that the plan, and the activations of an earlier run, give against it."""
        if attempt.setting.why_not:
            return attempt.setting.why_not
        scope, limit = ("rank", self.survey["device_bytes"]) if self.survey["device_bytes"] else ("host", 0)
        limit = limit or self._memory_bytes
        needed = attempt.setting.bytes[scope]
        if needed > limit:
            return f"the plan takes {needed / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB before activations"
        ranks = 1 if scope == "rank" else self.survey["ranks_per_host"]
        with_activations = needed + ranks * self._activations(attempt.batch.micro, attempt.recomputes)
        if with_activations > limit:
            self._stopped_by_memory = attempt.batch
            return f"with its activations it would take {with_activations / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB"
        return ""

    def _activations(self, micro: int, recomputes: bool | None) -> int:
        """A rank's bytes, as the run with the nearest micro-batch had them; they grow with it."""
        alike = [row for row in self.rows if row.recomputes == recomputes]
        measured = [row for row in alike if row.result is not None and row.result["follows"]]
        if not measured:
            return 0
        near = min(measured, key=lambda row: abs(row.batch.micro - micro))
        assert near.result is not None
        used = near.result["device_bytes"] or near.result["grown_bytes"]
        return max(int(used) - near.setting.bytes["rank"], 0) * micro // near.batch.micro

    def _stage_of(self, attempt: Attempt) -> int:
        return int(attempt.setting.patch.get("zero_optimization", {}).get("stage", self.survey["stage"]))

    def _the_best(self) -> Attempt:
        assert self.best is not None
        return self.best


def table(search: Search) -> str:
    """A table of what was tried, what came of it and why."""
    head = f"{'':2}{'configuration':<54}{'batch':>9}{'step':>11}{'samples/s':>12}{'memory':>10}  "
    rows = [head + "why"]
    for row in search.rows:
        mark = "* " if row is search.best else "  "
        figures = f"{'':33}"
        if row.result is not None:
            used = row.result["device_bytes"] or row.result["grown_bytes"]
            figures = f"{row.result['step_s']:9.4f} s{row.result['samples_per_s']:12.2f}{used / _GIB:6.2f} GiB"
        rows.append(f"{mark}{row.name:<54}{row.batch!s:>9}{figures}  {'; '.join(filter(None, (row.why, row.outcome)))}")
    rows.append("batch: micro-batch x accumulation; memory: what a rank's grew by, or its device's most")
    if search.end:
        rows.append(f"ended: {search.end}")
    if search.wanted["fast"] and search.survey["world"] > 1:
        rows.append('"fast": false in "autotuning" would try the sizes of buckets, too')
    return "\n".join(rows)
