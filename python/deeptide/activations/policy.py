# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An engine's policy for activations: what blocks keep and where, chosen once for the ranks that share a step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
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
from deeptide.activations.spill import BLOCK_BYTES, Rates, Store, measure
from deeptide.pipeline.module import PipelineModule

if TYPE_CHECKING:
    from deeptide._C import StepOutcome
    from deeptide.engine import Engine


_SPILLING = ("host", "files")  # policies by which all that blocks keep lies elsewhere
_NEVER = 1 << 62  # nanoseconds of what is no choice


def _files_ns(block: Measured, rates: Rates | None) -> int:
    """Nanoseconds that files add to a block's micro-batch."""
    return _NEVER if rates is None else max(round(1e9 * rates.seconds(block.bytes, block.nanoseconds / 1e9)), 1)


class Activations:
    """Made before the engine, by what the configuration's section asks for; `begin` takes the model's blocks over."""

    def __init__(self, section: dict[str, Any], model: torch.nn.Module) -> None:
        """Errors: ConfigError; nothing was changed."""
        self._budget = budget_of(section)
        self._policy = section["policy"] if self._budget is None else "auto"
        folders = section["nvme_path"] or []
        listed = [folders] if isinstance(folders, str) else folders
        self._folders = [os.path.abspath(folder) for folder in listed]  # files are made later
        self._num_blocks = section["buffer_count"]
        self._store: Store | None = None
        self._model = model
        self._deferred: list[Callable[[], None]] = []
        self._meter: Meter | None = None
        self._check_folders()
        self._check(model, self._policy)
        self._find()

    def _find(self) -> None:
        spills = self._policy in _SPILLING
        found = blocks_of(self._model, self._policy)
        self._blocks = [Block(name, module, "keep" if spills else "recompute") for name, module in found.items()]
        check_reach(self._blocks)
        # The switches of Transformers' own recomputation: of the model's modules, wherever a version has them.
        self._switches = [m for m in self._model.modules() if hasattr(m, "gradient_checkpointing")]
        redone = [] if spills else list(found)
        in_files = list(found) if self._policy == "files" else []
        self.choice = Choice(self._policy, list(found), redone, budget_bytes=self._budget, in_files=in_files)

    def _check_folders(self) -> None:
        if self._policy == "files" and not self._folders:
            raise ConfigError(
                'activation_checkpointing.policy is "files", and nvme_path is missing: give it a folder on the drive, '
                "or a list of folders"
            )
        if self._folders and self._policy not in ("files", "auto"):
            raise ConfigError(
                f'activation_checkpointing.nvme_path is for policy "files" or "auto", and policy is "{self._policy}"; '
                "set one of these, or leave nvme_path out"
            )

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
                '"recompute", "files" with nvme_path, or "auto" with memory'
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
        if self._policy in _SPILLING or self._folders:
            self._store = self._new_store()
        if self._store is not None and self._policy in _SPILLING:
            for block in self._blocks:
                block.spill_to(self._store)
        take_over(self._blocks)
        self.choice = dataclasses.replace(self.choice, live=self._live)
        if self._policy == "auto":
            self._meter = Meter(self.choice.blocks, self._engine.device)
            for block in self._blocks:
                block.meter = self._meter

    def _new_store(self) -> Store:
        return Store(self._engine._core, self._folders, self._num_blocks)

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
        if self._store is None:
            return self.choice
        most = self._store.peak_bytes()
        if self._folders:
            return dataclasses.replace(self.choice, file_bytes=most)
        return dataclasses.replace(self.choice, host_bytes=most)

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
        self._take(blocks, outside, self._rates())
        self._apply()
        engine = self._engine
        team = engine.tensor_team
        if engine.data_parallel_rank == 0 and (team is None or team.index == 0):
            stage = f"stage {engine.stage_id}, " if engine.mesh["pipe"] > 1 else ""
            say(f"{stage}{self.choice}")

    def _agreed(self, meter: Meter) -> tuple[list[Measured], int, bool]:
        """The most of all ranks of the data team, alike on them and on ranks that share layers. Collective."""
        meter.await_times()
        figures = [float(each) for block in meter.results() for each in block]
        *numbers, outside, has_measured = self._most([*figures, meter.outside, meter.has_measured])
        count = len(self._blocks)
        rows = [Measured(*(int(each) for each in numbers[3 * i : 3 * i + 3])) for i in range(count)]
        return rows, int(outside), bool(has_measured)

    def _most(self, figures: list[float]) -> list[float]:
        """The most of all ranks of the data team, alike on them and on ranks that share layers. Collective."""
        own = torch.tensor(figures, dtype=torch.float64)
        engine = self._engine
        most = torch.zeros_like(own)
        for rank in range(engine.data_parallel_size):
            values = own if rank == engine.data_parallel_rank else torch.zeros_like(own)
            if engine.data_parallel_size > 1:
                engine._core.broadcast(values, rank)
            most = torch.maximum(most, values)
        if engine.tensor_team is not None:
            engine.tensor_team.core.broadcast(most, "step")
        return most.tolist()

    def _rates(self) -> Rates | None:
        """Measures what files cost while all ranks use them; None: there are none. Collective."""
        if self._store is None:
            return None
        return Rates(*self._most(list(measure(self._store, self._num_blocks, self._engine.device))))

    def _take(self, blocks: list[Measured], outside: int, rates: Rates | None) -> None:
        assert self._budget is not None
        blocks = alike(blocks, [block.kind for block in self._blocks])
        seconds = [_files_ns(block, rates) for block in blocks]
        away = None
        if rates is not None:  # what passes through memory on its way to files takes some of the budget
            room = self._budget - self._num_blocks * BLOCK_BYTES
            costs = [
                block._replace(nanoseconds=min(block.nanoseconds, ns))
                for block, ns in zip(blocks, seconds, strict=True)
            ]
            away = choose(costs, outside, self._live, room)
        if away is None:
            away, seconds = choose(blocks, outside, self._live, self._budget), [_NEVER] * len(blocks)
        assert away is not None  # _check_room has seen to it
        none, every = [False] * len(blocks), [True] * len(blocks)
        rows = [row for row, gone in zip(zip(self._blocks, blocks, seconds, strict=True), away, strict=True) if gone]
        files = [(block.name, ns) for block, measured, ns in rows if ns < measured.nanoseconds]
        redone = [(block.name, measured.nanoseconds) for block, measured, ns in rows if ns >= measured.nanoseconds]
        self.choice = dataclasses.replace(
            self.choice,
            recomputed=[name for name, _ in redone],
            in_files=[name for name, _ in files],
            predicted_bytes=peak(blocks, away, outside, self._live) + (self._num_blocks * BLOCK_BYTES if files else 0),
            kept_bytes=peak(blocks, none, outside, self._live),
            least_bytes=peak(blocks, every, outside, self._live),
            recomputed_seconds=sum(ns for _, ns in redone) / 1e9,
            files_seconds=sum(ns for _, ns in files) / 1e9 if files else None,
        )

    def _apply(self) -> None:
        redone, in_files = set(self.choice.recomputed), set(self.choice.in_files)
        self._meter = None
        # A choice that is loaded may want files though the one before it did not.
        self._store = (self._store or self._new_store()) if in_files else None
        for block in self._blocks:
            block.meter, block.mode = None, "recompute" if block.name in redone else "keep"
            if block.name in in_files and self._store is not None:
                block.spill_to(self._store)
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
            "files": bool(self._folders),
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
