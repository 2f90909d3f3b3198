# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One step of a mesh on paper: activations that are alive, what each stage's ranks send, and how long it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from deeptide._C import SimulatedStep, StageCosts
from deeptide._forecast.measure import MicroBatch, Part
from deeptide._forecast.plan_mesh import Mesh
from deeptide.activations.choice import peak
from deeptide.pipeline.passing.letters import HEADER_BYTES
from deeptide.pipeline.schedules import SCHEDULES, published_idle_time, published_peak_activations, simulate

_OPTIMIZER_BYTES = 30  # that AdamW reads and writes for each element it steps, with bf16 parameters


@dataclasses.dataclass(frozen=True)
class Rates:
    """The work of one rank in a second. The defaults are those of an accelerator of 312 Tflop/s at half its peak.

    flops: of products, in a model's own shapes. within, between: bytes sent to ranks of the host, and to other hosts.
    memory: bytes that an optimizer reads and writes.
    """

    flops: float = 156e12
    within: float = 200e9
    between: float = 20e9
    memory: float = 1.2e12


class Transfer(NamedTuple):
    """The tensors of one kind that a rank sends in a step. Units: bytes."""

    kind: str
    within_bytes: int  # to ranks of its host
    between_bytes: int  # to other hosts

    def seconds(self, rates: Rates) -> float:
        """Takes a rank that sends nothing else."""
        return self.within_bytes / rates.within + self.between_bytes / rates.between


@dataclasses.dataclass(frozen=True)
class Order:
    """How a step goes: schedule, micro-batches, chunks of each stage, and whether backward computes blocks again."""

    schedule: str
    micro_batches: int
    chunks: int = 1
    recompute: bool = False

    def alive(self, stages: int, stage: int) -> int:
        """Micro-batches whose activations are alive at once; chunks, which each keep a part, are rounded up."""
        kind = SCHEDULES[self.schedule]
        peak_of_chunks = published_peak_activations(kind, stages, self.micro_batches, stage, self.chunks)
        return -(-peak_of_chunks // self.chunks)

    def _simulated(self, stages: int, micro_batches: int, costs: StageCosts) -> SimulatedStep:
        return simulate(SCHEDULES[self.schedule], stages, micro_batches, self.chunks, costs)

    def simulate(self, stages: int, costs: StageCosts) -> tuple[float, float]:
        """(time, share of it in which stages wait), by the simulator.

        Of many micro-batches, those beyond four for each stage take what the ones before them take.
        """
        few = 4 * stages + self.micro_batches % stages
        if self.micro_batches <= few:
            step = self._simulated(stages, self.micro_batches, costs)
            return step.time, step.bubble
        step = self._simulated(stages, few, costs)
        each = (step.time - self._simulated(stages, few - stages, costs).time) / stages
        time = step.time + (self.micro_batches - few) * each
        busy = self.micro_batches * (costs.forward + costs.backward_input + costs.backward_weight)
        return time, 1.0 - busy / time


@dataclasses.dataclass(frozen=True)
class StageForecast:
    """One step of one rank of a stage."""

    live: int  # micro-batches whose activations are alive at once
    activation_bytes: int  # at most
    transfers: list[Transfer]
    forward_s: float  # of one micro-batch, with what it exchanges inside layers
    backward_s: float
    exposed_s: float  # transfers of a step that nothing hides, and the optimizer


@dataclasses.dataclass(frozen=True)
class StepForecast:
    """One step of the whole mesh."""

    stages: list[StageForecast]
    seconds: float
    bubble: float  # the share of the stages' time before the optimizer in which they wait, if all were as the slowest
    tokens: int  # or samples, of all ranks


def _split(kind: str, count: int, is_within: bool) -> Transfer:
    return Transfer(kind, count if is_within else 0, 0 if is_within else count)


class StagePlan(Protocol):
    """The part of a stage's plan that a step needs."""

    @property
    def stage(self) -> int:
        """ZeRO's."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the stage."""
        ...

    @property
    def num_trained(self) -> int:
        """Elements that are trained."""
        ...

    @property
    def transfers(self) -> Sequence[Any]:
        """Each with kind, within_bytes and between_bytes."""
        ...


class Step:
    """A step of a mesh. bounds: of the parts' blocks, chunk by chunk; plans: one for each stage, of such a step."""

    def __init__(
        self,
        micro: MicroBatch,
        plans: Sequence[StagePlan],
        mesh: Mesh,
        ranks_per_host: int,
        bounds: Sequence[int],
        order: Order,
    ) -> None:
        self._micro, self._plans, self._mesh, self._order = micro, plans, mesh, order
        self._on_host, self._bounds = ranks_per_host, bounds

    # -- the parts of a stage -----------------------------------------------------------------------------------------

    def _parts_of(self, stage: int) -> list[int]:
        return [chunk * self._mesh.pipeline + stage for chunk in range(self._order.chunks)]

    def _blocks(self, stage: int) -> list[Part]:
        found: list[Part] = []
        for part in self._parts_of(stage):
            run = self._micro.blocks[self._bounds[part] : self._bounds[part + 1]]
            if run and part > 0:
                kept = run[0].kept
                run[0] = dataclasses.replace(run[0], kept=kept._replace(bytes=kept.bytes + run[0].shared))
            found += run
        return found

    def _around(self, stage: int) -> list[Part]:
        """The parts that a stage computes beside its blocks."""
        first = [self._micro.before] if stage == 0 else []
        return first + ([self._micro.after] if stage == self._mesh.pipeline - 1 else [])

    def live(self, stage: int) -> int:
        """Micro-batches alive at once."""
        return self._order.alive(self._mesh.pipeline, stage)

    def activation_bytes(self, stage: int) -> int:
        """The most that activations of one rank take."""
        blocks = [block.kept for block in self._blocks(stage)]
        outside = sum(part.kept.bytes for part in self._around(stage))
        if self._order.recompute and blocks:
            outside += max(block.arguments for block in self._blocks(stage))
        return peak(blocks, [self._order.recompute] * len(blocks), outside, self.live(stage))

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _letters(self, stage: int, towards: int) -> Transfer | None:
        """Activations to the next stage, or their gradients to the one before, and a header each."""
        kind = "activations" if towards > 0 else "activation gradients"
        count = 0
        for part in self._parts_of(stage):
            border = part + 1 if towards > 0 else part
            if self._mesh.pipeline > 1 and 0 < border < len(self._bounds) - 1:
                count += self._order.micro_batches * (self._micro.blocks[self._bounds[border]].handed + HEADER_BYTES)
        if count == 0:
            return None
        of_stage = self._mesh.data * self._mesh.tensor
        there = (stage + towards) % self._mesh.pipeline
        hosts = {number * of_stage // self._on_host for number in (stage, there)}
        ends = {((number + 1) * of_stage - 1) // self._on_host for number in (stage, there)}
        return _split(kind, count, len(hosts | ends) == 1)

    def _inside_layers(self, stage: int) -> Transfer | None:
        blocks, around = self._blocks(stage), self._around(stage)
        again = sum(part.sent_again for part in blocks) if self._order.recompute else 0
        count = again + sum(part.sent_forward + part.sent_backward for part in (*blocks, *around))
        is_within = self._on_host % self._mesh.tensor == 0
        return _split("tensor", self._order.micro_batches * count, is_within) if count else None

    def transfers(self, stage: int) -> list[Transfer]:
        """By kind: of the engine's collectives, between stages and inside layers."""
        ours = [Transfer(each.kind, each.within_bytes, each.between_bytes) for each in self._plans[stage].transfers]
        others = (self._letters(stage, 1), self._letters(stage, -1), self._inside_layers(stage))
        return ours + [each for each in others if each is not None]

    # -- time ---------------------------------------------------------------------------------------------------------

    def _computing(self, stage: int, rates: Rates) -> tuple[float, float]:
        """(forward, backward) of one micro-batch, which wait for what is exchanged inside layers."""
        blocks, around = self._blocks(stage), self._around(stage)
        is_within = self._on_host % self._mesh.tensor == 0
        link = rates.within if is_within else rates.between
        forward = sum(part.flops / rates.flops + part.sent_forward / link for part in blocks)
        again = sum(part.flops / rates.flops + part.sent_again / link for part in blocks)
        beside = sum(part.flops / rates.flops + part.sent_forward / link for part in around)
        backward = sum(2 * part.flops / rates.flops + part.sent_backward / link for part in (*blocks, *around))
        return forward + beside, backward + (again if self._order.recompute else 0.0)

    def _weights_s(self, stage: int, rates: Rates) -> float:
        """The part of backward that gives gradients of weights, if all products have weights: as long as forward."""
        return sum(part.flops for part in (*self._blocks(stage), *self._around(stage))) / rates.flops

    def _exposed(self, stage: int, forward: float, backward: float, rates: Rates) -> float:
        """Each pass hides its own transfers; the rest, and the optimizer, come on top."""
        plan, count = self._plans[stage], self._order.micro_batches
        took = {each.kind: each.seconds(rates) for each in self.transfers(stage)}
        parameters, gradients = took.get("parameters", 0.0), took.get("gradients", 0.0)
        exposed = took.get("summed gradients", 0.0)
        if plan.stage == 3:
            exposed += count * max(0.0, (parameters + gradients) / count - forward - backward)
        elif plan.stage == 2:
            exposed += parameters + count * max(0.0, gradients / count - backward)
        else:
            exposed += parameters + max(0.0, gradients - backward)
        owners = plan.world_size if plan.stage > 0 else 1
        return exposed + _OPTIMIZER_BYTES * plan.num_trained / owners / rates.memory

    def _stage(self, stage: int, rates: Rates) -> StageForecast:
        forward, backward = self._computing(stage, rates)
        exposed = self._exposed(stage, forward, backward, rates)
        transfers = self.transfers(stage)
        return StageForecast(self.live(stage), self.activation_bytes(stage), transfers, forward, backward, exposed)

    def _costs(self, stages: Sequence[StageForecast], rates: Rates) -> StageCosts:
        """Those of the slowest stage: the others wait for it."""
        number, slowest = max(enumerate(stages), key=lambda each: each[1].forward_s + each[1].backward_s)
        weights = self._weights_s(number, rates)
        letters = [t for each in stages for t in each.transfers if t.kind.startswith("activation")]
        transfer = max((letter.seconds(rates) for letter in letters), default=0.0)
        transfer /= self._order.micro_batches * self._order.chunks
        return StageCosts(slowest.forward_s, slowest.backward_s - weights, weights, transfer)

    def at_least(self, rates: Rates) -> float:
        """Seconds that a step takes by the schedule's formula, without what letters between stages take."""
        stages = [self._stage(stage, rates) for stage in range(self._mesh.pipeline)]
        costs = self._costs(stages, rates)
        order, kind = self._order, SCHEDULES[self._order.schedule]
        busy = order.micro_batches * (costs.forward + costs.backward_input + costs.backward_weight)
        idle = published_idle_time(kind, self._mesh.pipeline, order.micro_batches, costs, order.chunks)
        return busy + idle + max(stage.exposed_s for stage in stages)

    def forecast(self, rates: Rates) -> StepForecast:
        """Per stage and as a whole."""
        stages = [self._stage(stage, rates) for stage in range(self._mesh.pipeline)]
        time, bubble = self._order.simulate(self._mesh.pipeline, self._costs(stages, rates))
        seconds = time + max(stage.exposed_s for stage in stages)
        tokens = self._micro.tokens * self._order.micro_batches * self._mesh.data
        return StepForecast(stages, seconds, bubble, tokens)
