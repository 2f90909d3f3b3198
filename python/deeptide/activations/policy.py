# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An engine's policy for activations: which blocks are recomputed, chosen once for the ranks that share a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deeptide._C import ConfigError, StepResult
from deeptide._model.describe import device_of
from deeptide._model.recomputation import recomputes
from deeptide._process.log import say
from deeptide.activations.again import Block
from deeptide.activations.blocks import blocks_of, check_reach, give_back, take_over
from deeptide.activations.choice import Choice, Measured, alike, budget_of, choose, peak, size
from deeptide.activations.measure import Meter
from deeptide.pipeline.module import PipelineModule

if TYPE_CHECKING:
    from deeptide._C import StepOutcome
    from deeptide.engine import Engine


class Activations:
    """Made before the engine, by what the configuration's section asks for; `begin` takes the model's blocks over."""

    def __init__(self, section: dict[str, Any], model: torch.nn.Module) -> None:
        """Errors: ConfigError; nothing was changed."""
        self._budget = budget_of(section)
        self._policy = section["policy"] if self._budget is None else "auto"
        self._model = model
        self._deferred: list[Callable[[], None]] = []
        self._meter: Meter | None = None
        self._check(model, self._policy)
        self._find()

    def _find(self) -> None:
        mode = "host" if self._policy == "host" else "recompute"
        found = blocks_of(self._model, self._policy)
        self._blocks = [Block(name, module, mode) for name, module in found.items()]
        check_reach(self._blocks)
        # The switches of Transformers' own recomputation: of the model's modules, wherever a version has them.
        self._switches = [m for m in self._model.modules() if hasattr(m, "gradient_checkpointing")]
        redone = list(found) if mode == "recompute" else []
        self.choice = Choice(self._policy, list(found), redone, budget_bytes=self._budget)

    @staticmethod
    def _check(model: torch.nn.Module, policy: str) -> None:
        if isinstance(model, PipelineModule):
            raise ConfigError(
                f'activation_checkpointing.policy is "{policy}", and a PipelineModule recomputes by its own argument: '
                "give it activation_checkpoint_interval=1, and leave the key out"
            )
        if policy == "host" and device_of(model).type == "cpu":
            raise ConfigError(
                'activation_checkpointing.policy is "host", and on a CPU all of it lies in the host\'s memory; take '
                '"recompute", or "auto" with memory'
            )
        if recomputes(model):
            _refuse_twice(model)

    def begin(self, engine: Engine) -> None:
        """Takes the blocks over; the engine trains with them from now on."""
        self._engine = engine
        self._live = engine._live_micro_batches()
        self._begin()
        if engine.world.rank == 0:
            say(str(self.choice))

    def _begin(self) -> None:
        take_over(self._blocks)
        self.choice = dataclasses.replace(self.choice, live=self._live)
        if self._policy == "auto":
            self._meter = Meter(self.choice.blocks, self._engine.device)
            for block in self._blocks:
                block.meter = self._meter

    def follow(self) -> None:
        """Takes the model's blocks as they are now, and measures them."""
        self.end()
        self._find()
        self._begin()

    def end(self) -> None:
        """Gives the blocks back."""
        for block in self._blocks:
            give_back(block.module, block)

    def current(self) -> Choice:
        """The choice as it is now."""
        most = sum(block.on_host.tally.most for block in self._blocks if block.on_host is not None)
        return dataclasses.replace(self.choice, host_bytes=most) if most else self.choice

    def after_choice(self, work: Callable[[], None]) -> bool:
        """Does it once the first step has measured. False: that is so already, or needs no measure."""
        if self._meter is not None:
            self._deferred.append(work)
        return self._meter is not None

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward of the engine."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if any(module.gradient_checkpointing for module in self._switches):
            _refuse_twice(self._model)
        return contextlib.nullcontext() if self._meter is None else self._measured(self._meter)

    @contextlib.contextmanager
    def _measured(self, meter: Meter) -> Iterator[None]:
        with meter.forward(self._model):
            try:
                yield
            except Exception:
                raise
            except BaseException:  # a stage of a pipeline ends so
                self._end_forward(meter)
                raise
        self._end_forward(meter)

    def _end_forward(self, meter: Meter) -> None:
        meter.end_forward()
        self._check_room(meter.results(), meter.outside)

    def _check_room(self, blocks: list[Measured], outside: int) -> None:
        """Errors: ConfigError if recomputing every block does not fit."""
        least = peak(blocks, [True] * len(blocks), outside, self._live)
        if self._budget is None or least <= self._budget:
            return
        inputs, largest = sum(block.input_bytes for block in blocks), max(block.bytes for block in blocks)
        raise ConfigError(
            f"activation_checkpointing.memory is {size(self._budget)}, and activations take {size(least)} with all "
            f"{len(blocks)} blocks recomputed: {self._live} micro-batches alive, each with {size(inputs)} of inputs of "
            f"blocks and {size(outside)} beside them, and {size(largest)} of one block in backward; raise it, or lower "
            "train_micro_batch_size_per_gpu or the length of the batches"
        )

    def after_step(self, outcome: StepOutcome | None) -> None:
        """After any step of the engine. Collective over the ranks that step together, when the first one is done."""
        if self._meter is None or outcome is None or outcome.result == StepResult.accumulating:
            return
        blocks, outside, has_measured = self._agreed(self._meter)
        if not has_measured:
            return
        self._check_room(blocks, outside)
        self._take(blocks, outside)
        self._apply()
        engine = self._engine
        team = engine.tensor_team
        if engine.data_parallel_rank == 0 and (team is None or team.index == 0):
            stage = f"stage {engine.stage_id}, " if engine.mesh["pipe"] > 1 else ""
            say(f"{stage}{self.choice}")

    def _agreed(self, meter: Meter) -> tuple[list[Measured], int, bool]:
        """The most of all ranks of the data team, alike on them and on ranks that share layers. Collective."""
        figures = [float(each) for block in meter.results() for each in block]
        own = torch.tensor([*figures, meter.outside, meter.has_measured], dtype=torch.float64)
        engine = self._engine
        most = torch.zeros_like(own)
        for rank in range(engine.data_parallel_size):
            values = own if rank == engine.data_parallel_rank else torch.zeros_like(own)
            if engine.data_parallel_size > 1:
                engine._core.broadcast(values, rank)
            most = torch.maximum(most, values)
        if engine.tensor_team is not None:
            engine.tensor_team.core.broadcast(most, "step")
        *numbers, outside, has_measured = most.tolist()
        count = len(self._blocks)
        rows = [Measured(*(int(each) for each in numbers[3 * i : 3 * i + 3])) for i in range(count)]
        return rows, int(outside), bool(has_measured)

    def _take(self, blocks: list[Measured], outside: int) -> None:
        assert self._budget is not None
        blocks = alike(blocks, [block.kind for block in self._blocks])
        again = choose(blocks, outside, self._live, self._budget)
        assert again is not None  # _check_room has seen to it
        none, every = [False] * len(blocks), [True] * len(blocks)
        time = sum(block.nanoseconds for block, redone in zip(blocks, again, strict=True) if redone)
        self.choice = dataclasses.replace(
            self.choice,
            recomputed=[block.name for block, redone in zip(self._blocks, again, strict=True) if redone],
            predicted_bytes=peak(blocks, again, outside, self._live),
            kept_bytes=peak(blocks, none, outside, self._live),
            least_bytes=peak(blocks, every, outside, self._live),
            recomputed_seconds=time / 1e9,
        )

    def _apply(self) -> None:
        redone = set(self.choice.recomputed)
        self._meter = None
        for block in self._blocks:
            block.meter, block.mode = None, "recompute" if block.name in redone else "keep"
        deferred, self._deferred = self._deferred, []
        for work in deferred:
            work()

    # -- a checkpoint -------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """The facts that a choice was made for."""
        engine = self._engine
        return {
            "budget": self._budget,
            "blocks": self.choice.blocks,
            "live": self._live,
            "samples": engine.train_micro_batch_size_per_gpu(),
            "mesh": engine.mesh | {"data": 0},
        }

    def state_dict(self) -> dict[str, Any] | None:
        """The choice, for a checkpoint; None where nothing was measured."""
        if self._policy != "auto" or self._meter is not None:
            return None
        return {"for": self._facts(), "choice": dataclasses.asdict(self.choice)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a choice that was made for the same blocks, batch and budget; else the next step measures."""
        if self._policy != "auto" or state["for"] != self._facts():
            return
        self.choice = Choice(**state["choice"])
        self._apply()


def _refuse_twice(model: torch.nn.Module) -> NoReturn:
    raise ConfigError(
        f"activation_checkpointing.policy: {type(model).__name__}'s own recomputation is on, and each block would be "
        "computed twice in backward; call gradient_checkpointing_disable(), or leave the policy out"
    )
