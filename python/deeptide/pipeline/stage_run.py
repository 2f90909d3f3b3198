# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One stage's part of a step: receives, computes and sends as the schedule's list says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deeptide import _C
from deeptide._C import PipelineSchedule, StageAction
from deeptide.engine import Engine
from deeptide.pipeline.letters import Letters, Subject, tensors_in

if TYPE_CHECKING:
    from deeptide.pipeline.engine import PipelineEngine
    from deeptide.pipeline.ties import Ties


class StageModel(Protocol):
    """A model on one stage, as a step needs it: a PipelineModule, or of a model cut by blocks."""

    stage_id: int
    num_stages: int
    ties: Ties

    def run_stage(self, forward: Callable[..., Any], inputs: Any, received: Any) -> Any:
        """Returns what is handed on, or the last output. `forward`: the engine's; `inputs`: None where not read."""

    def loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        """The scalar loss of the last stage's output."""


class StageRun:
    """Runs steps of one stage. `stage` is None where the pipeline has one stage alone."""

    def __init__(self, engine: PipelineEngine, stage: _C.PipelineStage | None, model: StageModel) -> None:
        self._engine, self._stage, self._model, self._ties = engine, stage, model, model.ties
        self._letters = Letters(stage) if stage is not None else None
        self._here, self._last = model.stage_id, model.num_stages - 1
        self._number = 0  # of steps and evaluations so far
        self._batches: list[tuple[Any, Any]] = []
        self._count = 0
        self._losses: list[torch.Tensor] = []
        # By micro-batch: tensors that another stage sent, and those that it was sent.
        self._received: dict[int, Any] = {}
        self._sent: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        self._inputs: dict[int, list[torch.Tensor]] = {}

    def train(self, schedule: PipelineSchedule, batches: list[tuple[Any, Any]], count: int) -> list[torch.Tensor]:
        """Runs one optimizer step; returns the losses of the last stage, none on the others."""
        self._prepare(batches, count, training=True)
        actions = {
            StageAction.receive_activation: self._receive_activation,
            StageAction.forward: self._forward,
            StageAction.send_activation: self._send_activation,
            StageAction.receive_gradient: self._receive_gradient,
            StageAction.backward: self._backward,
            StageAction.send_gradient: self._send_gradient,
        }
        for instruction in _C.stage_instructions(schedule, self._last + 1, count, self._here):
            actions[instruction.action](instruction.micro_batch)
        return self._losses

    def evaluate(
        self, batches: list[tuple[Any, Any]], count: int, compute_loss: bool
    ) -> tuple[list[torch.Tensor], list[Any] | None]:
        """Runs forwards alone; returns the last stage's losses and outputs."""
        self._prepare(batches, count, training=False)
        outputs = []
        for micro_batch in range(count):
            if self._here > 0:
                self._receive_activation(micro_batch)
            output = self._output(micro_batch)
            if self._here < self._last:
                self._send("activation", micro_batch, output, self._here + 1)
                if micro_batch % (self._last + 1) == self._last and self._stage is not None:
                    self._stage.flush()  # what was sent lies here until it is taken
                continue
            outputs.append(output)
            if compute_loss:
                self._losses.append(self._loss(output, micro_batch))
        return self._losses, outputs if self._here == self._last else None

    def _prepare(self, batches: list[tuple[Any, Any]], count: int, training: bool) -> None:
        self._number += 1
        self._batches, self._count, self._losses = batches, count, []
        for held in (self._received, self._sent, self._gradients, self._inputs):
            held.clear()  # of a step that failed
        if self._letters is None:
            return
        lends = training or not self._ties.is_open  # else what was lent for a step under way stays
        due = self._ties.letters(training) if lends else {}
        for source, comes in ((self._here - 1, self._here > 0), (self._here + 1, training and self._here < self._last)):
            if comes:
                due[source] = due.get(source, 0) + count
        self._letters.begin(due)
        if lends:
            self._ties.exchange_values(self._letters, self._number, training)

    def _receive(self, kind: str, micro_batch: int, source: int) -> Any:
        assert self._letters is not None
        return self._letters.receive(Subject(kind, micro_batch, self._number), source)

    def _send(self, kind: str, micro_batch: int, tree: Any, to: int) -> None:
        assert self._letters is not None
        self._letters.send(Subject(kind, micro_batch, self._number), tree, to)

    def _receive_activation(self, micro_batch: int) -> None:
        self._received[micro_batch] = self._receive("activation", micro_batch, self._here - 1)

    def _output(self, micro_batch: int) -> Any:
        received = self._received.pop(micro_batch) if self._here > 0 else None
        inputs = self._batches[micro_batch][0] if self._batches else None
        self._inputs[micro_batch] = tensors_in(received)
        return self._model.run_stage(self._forward_of_engine, inputs, received)

    def _forward_of_engine(self, *args: Any, **kwargs: Any) -> Any:
        return Engine.forward(self._engine, *args, **kwargs)

    def _loss(self, output: Any, micro_batch: int) -> torch.Tensor:
        return self._model.loss_of(output, self._batches[micro_batch][1])

    def _forward(self, micro_batch: int) -> None:
        output = self._output(micro_batch)
        self._sent[micro_batch] = output if self._here < self._last else self._loss(output, micro_batch)

    def _send_activation(self, micro_batch: int) -> None:
        self._send("activation", micro_batch, self._sent[micro_batch], self._here + 1)

    def _receive_gradient(self, micro_batch: int) -> None:
        self._gradients[micro_batch] = self._receive("gradient", micro_batch, self._here + 1)

    def _backward(self, micro_batch: int) -> None:
        sent = self._sent.pop(micro_batch)
        if self._here == self._last:
            self._losses.append(sent.detach())
            Engine.backward(self._engine, sent)
        else:
            self._backward_from(sent, self._gradients.pop(micro_batch), micro_batch)
        self._ties.add_gradients()
        if self._here == 0:
            self._end(micro_batch)

    def _backward_from(self, sent: Any, gradients: list[torch.Tensor | None], micro_batch: int) -> None:
        outputs = [tensor for tensor in tensors_in(sent) if tensor.requires_grad]
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        assert self._stage is not None and self._letters is not None
        if micro_batch == self._count - 1:
            pairs += zip(*self._ties.take_gradients(self._letters, self._number), strict=True)
        if pairs:
            self._stage.backward([out for out, _ in pairs], [grad for _, grad in pairs])

    def _send_gradient(self, micro_batch: int) -> None:
        gradients = [tensor.grad for tensor in self._inputs[micro_batch] if tensor.requires_grad]
        self._send("gradient", micro_batch, gradients, self._here - 1)
        self._end(micro_batch)

    def _end(self, micro_batch: int) -> None:
        """After a micro-batch's backward, when its gradient is on its way."""
        del self._inputs[micro_batch]
        if micro_batch == self._count - 1 and self._letters is not None:
            self._ties.send_gradients(self._letters, self._number)
        self._engine.close_micro_batch()
