# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Searches pipeline x tensor x data, stage, micro-batch, schedule and recomputation for the fastest step that fits."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide._forecast.measure import MicroBatch, Part, measured
from deeptide._forecast.plan_mesh import Mesh, Parts, bounds_of, mesh_of, plans_of_stages
from deeptide._forecast.steps import Order, Rates, Step, StepForecast, Transfer
from deeptide.activations.choice import Measured, size

_MICRO_BATCHES = (1, 2, 4, 8)  # samples of one
_ORDERS = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4))  # schedule, chunks


@dataclasses.dataclass(frozen=True)
class MeshChoice:
    """One mesh and order of a step. Units: bytes of the fullest rank, seconds of a step."""

    mesh: Mesh
    zero_stage: int
    samples: int  # of a micro-batch
    order: Order
    state_bytes: int  # the engine's own
    activation_bytes: int
    why_not: str  # empty: it fits
    step: StepForecast | None  # of those that fit and were among the fastest
    flops: int  # of products in the model's forward and backward of a step

    @property
    def bytes(self) -> int:
        """All that is forecast of the fullest rank."""
        return self.state_bytes + self.activation_bytes

    @property
    def sections(self) -> dict[str, Any]:
        """The keys to write into the configuration."""
        parallel: dict[str, Any] = {"pipeline": self.mesh.pipeline, "tensor": self.mesh.tensor}
        if self.mesh.pipeline > 1:
            parallel["schedule"] = self.order.schedule
        if self.order.chunks > 1:
            parallel["chunks"] = self.order.chunks
        found: dict[str, Any] = {
            "parallel": {name: value for name, value in parallel.items() if value != 1},
            "zero_optimization": {"stage": self.zero_stage},
            "train_micro_batch_size_per_gpu": self.samples,
            "gradient_accumulation_steps": self.order.micro_batches,
        }
        if self.order.recompute:
            found["activation_checkpointing"] = {"policy": "recompute"}
        return {name: value for name, value in found.items() if value != {}}

    def __str__(self) -> str:
        again = ", recomputed" if self.order.recompute else ""
        chunks = f" x {self.order.chunks}" if self.order.chunks > 1 else ""
        schedule = f", {self.order.schedule}{chunks}" if self.mesh.pipeline > 1 else ""
        return f"{self.mesh}, ZeRO {self.zero_stage}, {self.order.micro_batches} x {self.samples}{schedule}{again}"


def _line(one: int, two: int, samples: int) -> int:
    """A number for so many samples, from those for one and two."""
    return max(one + (samples - 1) * (two - one), 0)


def _scaled(one: Part, two: Part, samples: int) -> Part:
    kept = Measured(*(_line(a, b, samples) for a, b in zip(one.kept, two.kept, strict=True)))
    names = [field.name for field in dataclasses.fields(Part)][1:]
    return Part(kept, *(_line(getattr(one, name), getattr(two, name), samples) for name in names))


class _Layout(NamedTuple):
    """All that decides a mesh's memory, but for activations."""

    mesh: Mesh
    zero_stage: int
    chunks: int


class Search:
    """The search for one model, configuration and number of ranks. batch: one micro-batch, of any number of rows."""

    def __init__(self, model: nn.Module, config: Config, ranks: int, on_host: int, batch: Any, rates: Rates) -> None:
        self._model, self._config, self._ranks, self._on_host = model, config, ranks, on_host
        self._batch, self._rates = batch, rates
        self._train = config.batch_sizes(mesh_of(config, ranks).data).train
        self._micro: dict[tuple[int, int], MicroBatch | None] = {}
        self._plans: dict[tuple[_Layout, int], list[_C.MemoryPlan]] = {}
        self._cuts: dict[tuple[int, int], list[int]] = {}
        self._parts: dict[tuple[int, int, int], Parts] = {}
        self._names = bounds_of(model, 1, 1)[0]

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _meshes(self) -> Iterator[Mesh]:
        blocks = max(len(self._names), 1)
        for tensor in (n for n in range(1, self._on_host + 1) if self._on_host % n == 0 and self._ranks % n == 0):
            if self._measured(tensor, 1) is None:
                continue
            rest = self._ranks // tensor
            for stages in (n for n in range(1, min(rest, blocks) + 1) if rest % n == 0):
                yield Mesh(stages, rest // stages, tensor)

    def _candidates(self) -> Iterator[tuple[_Layout, int, Order]]:
        for mesh in self._meshes():
            stages = (1, 2, 3)
            orders = _ORDERS if mesh.pipeline > 1 else _ORDERS[:1]
            for zero, samples, (schedule, chunks) in itertools.product(stages, _MICRO_BATCHES, orders):
                count, rest = divmod(self._train, samples * mesh.data)
                if rest or count == 0 or (chunks > 1 and (count < mesh.pipeline or not self._has_parts(mesh, chunks))):
                    continue
                for recompute in (False, True):
                    yield _Layout(mesh, zero, chunks), samples, Order(schedule, count, chunks, recompute)

    def _has_parts(self, mesh: Mesh, chunks: int) -> bool:
        return len(self._names) >= mesh.pipeline * chunks

    # -- facts --------------------------------------------------------------------------------------------------------

    def _bounds(self, layout: _Layout) -> list[int]:
        key = layout.mesh.pipeline, layout.chunks
        if key not in self._cuts:
            self._cuts[key] = bounds_of(self._model, *key)[1]
        return self._cuts[key]

    def _measured(self, tensor: int, samples: int) -> MicroBatch | None:
        """None: so many ranks cannot share the model's layers."""
        if samples > 2:
            one, two = self._measured(tensor, 1), self._measured(tensor, 2)
            assert one is not None
            assert two is not None
            blocks = [_scaled(a, b, samples) for a, b in zip(one.blocks, two.blocks, strict=True)]
            before, after = _scaled(one.before, two.before, samples), _scaled(one.after, two.after, samples)
            return MicroBatch(before, blocks, after, samples * one.tokens)
        if (tensor, samples) not in self._micro:
            try:
                found = measured(self._model, self._config, self._names, self._batch, tensor, samples)
            except ConfigError:
                if tensor == 1:
                    raise
                found = None
            self._micro[tensor, samples] = found
        return self._micro[tensor, samples]

    def _planned(self, layout: _Layout, count: int) -> list[_C.MemoryPlan]:
        """The plans of all stages, with one micro-batch, two or three."""
        if (layout, count) not in self._plans:
            mesh = layout.mesh
            patch = {
                "parallel": {"pipeline": mesh.pipeline, "tensor": mesh.tensor, "data": mesh.data},
                "zero_optimization": {"stage": layout.zero_stage},
                "train_batch_size": count * mesh.data,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": count,
            }
            schedule = {"schedule": "interleaved", "chunks": layout.chunks} if layout.chunks > 1 else {}
            patch["parallel"] = {**patch["parallel"], **schedule}  # type: ignore[dict-item]
            config = self._config.merged(json.dumps(patch))
            key = mesh.pipeline, layout.chunks, mesh.tensor
            if key not in self._parts:
                self._parts[key] = Parts(self._model, config, mesh)
            self._plans[layout, count] = plans_of_stages(
                self._model, config, mesh, self._on_host, self._parts[key], alike=self._alike(layout)
            )
        return self._plans[layout, count]

    def _alike(self, layout: _Layout) -> list[int]:
        """For each stage the first one between the same neighbours with as many blocks."""
        stages, bounds = layout.mesh.pipeline, self._bounds(layout)
        keys = []
        for stage in range(stages):
            numbers = [bounds[part + 1] - bounds[part] for part in range(stage, stages * layout.chunks, stages)]
            keys.append((*numbers, stage == 0, stage == stages - 1))
        return [keys.index(key) for key in keys]

    def _plan_of(self, layout: _Layout, count: int) -> list[_Plan]:
        """Plans with any number of micro-batches: what is sent grows by as much with each from the third on."""
        if count <= 3:
            return [_Plan.of(each, each, 0) for each in self._planned(layout, count)]
        two, three = self._planned(layout, 2), self._planned(layout, 3)
        return [_Plan.of(a, b, count - 2) for a, b in zip(two, three, strict=True)]

    # -- the search ---------------------------------------------------------------------------------------------------

    def run(self, memory_bytes: int, best: int = 5) -> list[MeshChoice]:
        """The fastest that fit, from the fastest on; if none does, the one that lacks the least memory."""
        rows: list[tuple[float, int, MeshChoice, Step]] = []
        least: MeshChoice | None = None
        for number, (layout, samples, order) in enumerate(self._candidates()):
            choice, step = self._judged(layout, samples, order, memory_bytes)
            if choice.why_not:
                least = choice if least is None or choice.bytes < least.bytes else least
            else:
                rows.append((step.at_least(self._rates), number, choice, step))
        if not rows:
            return [least] if least is not None else []
        return self._fastest(rows, best)

    def _judged(self, layout: _Layout, samples: int, order: Order, memory_bytes: int) -> tuple[MeshChoice, Step]:
        mesh, plans = layout.mesh, self._plan_of(layout, order.micro_batches)
        micro = self._measured(mesh.tensor, samples)
        assert micro is not None
        step = Step(micro, plans, mesh, self._on_host, self._bounds(layout), order)
        each = [(plan.state_bytes, step.activation_bytes(stage)) for stage, plan in enumerate(plans)]
        states, activations = max(each, key=sum)
        lacks = states + activations - memory_bytes
        why_not = f"lacks {size(lacks)} on a rank" if lacks > 0 else ""
        whole = self._measured(1, 1)
        assert whole is not None
        flops = 3 * whole.flops * self._train
        return MeshChoice(mesh, layout.zero_stage, samples, order, states, activations, why_not, None, flops), step

    def _fastest(self, rows: list[tuple[float, int, MeshChoice, Step]], best: int) -> list[MeshChoice]:
        """Simulates in the order of the formula's bounds, until none of the others can be among the best."""
        found: list[tuple[float, int, MeshChoice]] = []
        for bound, number, choice, step in sorted(rows, key=lambda row: row[:2]):
            if len(found) >= best and bound > heapq.nsmallest(best, found)[-1][0]:
                break
            forecast = step.forecast(self._rates)
            found.append((forecast.seconds, number, dataclasses.replace(choice, step=forecast)))
        return [choice for _, _, choice in sorted(found, key=lambda row: row[:2])[:best]]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The part of a stage's plan that a step needs."""

    stage: int
    world_size: int
    num_trained: int
    state_bytes: int
    transfers: list[Transfer]

    @staticmethod
    def of(few: _C.MemoryPlan, more: _C.MemoryPlan, times: int) -> _Plan:
        """`times` the difference between two plans beyond the first one."""
        pairs = zip(few.transfers, more.transfers, strict=True)
        sent = [
            Transfer(
                a.kind,
                a.within_bytes + times * (b.within_bytes - a.within_bytes),
                a.between_bytes + times * (b.between_bytes - a.between_bytes),
            )
            for a, b in pairs
        ]
        peak = max(phase.memory_bytes for phase in more.phases)
        return _Plan(few.stage, few.world_size, few.num_trained, peak, sent)


def reason(choice: MeshChoice, rates: Rates) -> str:
    """Says on what a step spends its time."""
    step = choice.step
    assert step is not None
    slowest = max(step.stages, key=lambda each: each.forward_s + each.backward_s)
    computing = choice.order.micro_batches * (slowest.forward_s + slowest.backward_s) / step.seconds
    inside = max((t.seconds(rates) for each in step.stages for t in each.transfers if t.kind == "tensor"), default=0.0)
    exposed = max(each.exposed_s for each in step.stages) / step.seconds
    sums = f", of it {100 * inside / step.seconds:.0f} % sums inside layers" if inside else ""
    waits = f", bubble {100 * step.bubble:.1f} %" if choice.mesh.pipeline > 1 else ""
    return f"computing {100 * computing:.0f} %{sums}{waits}, exposed transfers and optimizer {100 * exposed:.1f} %"
