# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe.schedule: its instructions and schedules. deeptide.pipeline has more, and a simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One thing that a stage does; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Steps the optimizer."""


class ReduceGrads(PipeInstruction):
    """Reduces the gradients of a stage over its data ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduces the gradients of weights that several stages have."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in a buffer."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Takes a micro-batch of the data."""


class ForwardPass(BufferOpInstruction):
    """Runs forward."""


class BackwardPass(BufferOpInstruction):
    """Runs backward."""


class SendActivation(BufferOpInstruction):
    """Sends activations to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receives activations of the stage before."""


class SendGrad(BufferOpInstruction):
    """Sends gradients to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receives gradients of the next stage."""


class PipeSchedule(ABC):
    """A stage's instructions, step by step. Iterating gives the steps anew."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Buffers that hold micro-batches."""
        return self.micro_batches

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        if not self._valid_micro_batch(micro_batch_id):
            raise ValueError(f"micro-batch {micro_batch_id}: expected 0 to {self.micro_batches - 1}")
        return micro_batch_id % self.num_pipe_buffers()

    @property
    def stage(self) -> int:
        """This stage's number."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether inputs enter here."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss is made here."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> PipeSchedule:
        self._steps = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)


class InferenceSchedule(PipeSchedule):
    """Forwards alone."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields micro_batches + stages - 1 steps."""
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch = step - self.stage_id
            here = self._valid_micro_batch(micro_batch)
            buffer = (step + self.stage_id) % 2
            commands: list[PipeInstruction] = []
            if here and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(buffer))
            transfers: list[PipeInstruction] = []
            if self._valid_micro_batch(micro_batch - 1) and self._valid_stage(self.next_stage):
                transfers.append(SendActivation(1 - buffer))
            if here and self._valid_stage(self.prev_stage):
                transfers.append(RecvActivation(buffer))
            # Neighbours differ in their order: blocking sends would end, too.
            commands += transfers if self.stage_id % 2 == 0 else reversed(transfers)
            if here:
                commands.append(ForwardPass(buffer))
            yield commands

    def num_pipe_buffers(self) -> int:
        """Two, which take turns."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward and one backward in turn: deeptide.pipeline's one_f_one_b, with idle steps."""

    def _forward_at(self, step: int) -> int | None:
        """The micro-batch whose forward has this step, possibly none of the batch's; None in steps of backwards.

        Stage s runs the forward of micro-batch m in step 2m + s, and its backward in step 2m + 2 stages - 1 - s.
        """
        return (step - self.stage_id) // 2 if (step - self.stage_id) % 2 == 0 else None

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields 2 (micro_batches + stages - 1) steps."""
        total, previous = 2 * (self.micro_batches + self.stages - 1), -1
        for step in range(total):
            forward = self._forward_at(step)
            if forward is not None:
                commands, current = self._forward_step(forward, previous), forward
            else:
                current = (step - 2 * self.stages + 1 + self.stage_id) // 2
                commands = self._backward_step(current, previous)
            if step == total - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            previous = current
            yield commands

    def _forward_step(self, current: int, previous: int) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        here, has_previous = self._valid_micro_batch(current), self._valid_stage(self.prev_stage)
        if has_previous and self._valid_micro_batch(previous):
            commands.append(SendGrad(self._buffer_idx(previous)))
        if here and has_previous:
            commands.append(RecvActivation(self._buffer_idx(current)))
        if here and (self.is_first_stage or self.is_last_stage):
            commands.append(LoadMicroBatch(self._buffer_idx(current)))
        if here:
            commands.append(ForwardPass(self._buffer_idx(current)))
        return commands

    def _backward_step(self, current: int, previous: int) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        here, has_next = self._valid_micro_batch(current), self._valid_stage(self.next_stage)
        if here and has_next:
            commands.append(RecvGrad(self._buffer_idx(current)))
        if has_next and self._valid_micro_batch(previous):
            commands.append(SendActivation(self._buffer_idx(previous)))
        if here:
            commands.append(BackwardPass(self._buffer_idx(current)))
        return commands

    def num_pipe_buffers(self) -> int:
        """The micro-batches that are alive at once, and at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """One stage: forward and backward of each micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields a step for each micro-batch."""
        for micro_batch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1
