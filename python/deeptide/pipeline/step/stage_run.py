# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One stage's part of a step: receives, computes and sends as the schedule's list says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from deeptide import _C
from deeptide._C import PipelineSchedule, StageAction, StageInstruction
from deeptide._model.products import Pairs
from deeptide.engine import Engine
from deeptide.pipeline.passing.letters import Letters, Subject, handed, tensors_in
from deeptide.pipeline.step.set_aside import SetAside
from deeptide.pipeline.step.undo import Start, Undo

if TYPE_CHECKING:
    from deeptide.pipeline.cutting.ties import Ties
    from deeptide.pipeline.engine import PipelineEngine
    from deeptide.pipeline.passing.skips import Skips


class StageModel(Protocol):
    """A model on one stage, as a step needs it: a PipelineModule, or of a model cut by blocks."""

    stage_id: int
    num_stages: int
    num_chunks: int
    ties: Ties

    @property
    def skips(self) -> Skips | None:
        """Values that skip blocks. None: they go from layer to layer alone."""

    def begin(self) -> None:
        """Forwards of a step begin, or begin anew."""

    def kind_of(self, inputs: Any) -> Any:
        """The kind of a forward, by what may change which values it needs."""

    def run_stage(self, forward: Callable[..., Any], inputs: Any, received: Any, chunk: int) -> Any:
        """Returns what is handed on, or the last output. `forward`: the engine's; `inputs`: None where not read."""

    def loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        """The scalar loss of the last stage's output."""

    def trains(self, chunk: int) -> bool:
        """Whether a chunk has a trained parameter of its own."""

    def check_output(self, output: Any, in_step: bool = False) -> None:
        """Errors: PipelineError if an output that goes to the program holds anything of another stage."""

    def is_void(self) -> bool:
        """Whether the last forward lacked a value though its kind is settled."""

    def open_again(self, kinds: Iterable[Any]) -> None:
        """Lets all stages learn anew what forwards of these kinds need."""


_Made = TypeVar("_Made")
_Piece = tuple[int, int]  # a micro-batch in a chunk of this stage: (chunk, micro-batch)
_Actions = dict[StageAction, Callable[[_Piece], None]]

_FORWARD = (StageAction.receive_activation, StageAction.forward, StageAction.send_activation)
_BACKWARD = (
    StageAction.receive_gradient,
    StageAction.backward,
    StageAction.backward_input,
    StageAction.backward_weight,
    StageAction.send_gradient,
)
_OF_WEIGHTS = (StageAction.backward, StageAction.backward_weight)
_SOURCES = {StageAction.receive_activation: -1, StageAction.receive_gradient: 1}  # parts before and after the own one


def trained_chunks(model: StageModel) -> list[int]:
    """The chunks whose backwards are the core's micro-batches: on a stage that trains nothing all of them."""
    return [chunk for chunk in range(model.num_chunks) if model.trains(chunk)] or list(range(model.num_chunks))


class StageRun:
    """Runs steps of one stage. `stage` is None where the pipeline has one stage alone.

    The model's parts, in order, are chunk 0 of each stage, chunk 1 of each, and so on.
    """

    def __init__(self, engine: PipelineEngine, stage: _C.PipelineStage | None, model: StageModel) -> None:
        self._engine, self._stage, self._model, self._ties = engine, stage, model, model.ties
        self._letters = Letters(stage, engine._core.device()) if stage is not None else None
        self._here, self._stages, self._chunks = model.stage_id, model.num_stages, model.num_chunks
        self._last = self._stages - 1
        self._number = 0  # of steps and evaluations so far
        self._batches: list[tuple[Any, Any]] = []
        self._final: _Piece = (0, 0)  # of the last backward
        self._closing: set[_Piece] = set()  # whose backward the core is told of
        self._losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self._void: set[int] = set()  # micro-batches that a stage lacked a value for, in a kind that was settled
        self._learns = False  # what a forward needs
        self._start = Start()
        # By piece: tensors that another stage sent, and those that it was sent.
        self._received: dict[_Piece, Any] = {}
        self._sent: dict[_Piece, Any] = {}
        self._gradients: dict[_Piece, Any] = {}
        self._inputs: dict[_Piece, list[torch.Tensor]] = {}
        # If the schedule has gradients of weights apart. The first stage has nobody who waits for the others.
        self._aside: SetAside | None = None
        self._is_apart = False
        self._waited = 0.0  # seconds, in this step
        self._ended = 0.0  # when the last instruction of a step had computed and sent
        self.is_over = True  # nothing of a step is left that another stage waits for
        self.times = (0.0, 0.0)  # of the last step's instructions, without the optimizer's: seconds taken and waited

    def train(self, schedule: PipelineSchedule, batches: list[tuple[Any, Any]], count: int) -> list[torch.Tensor]:
        """Runs one optimizer step; returns the losses of the last stage, none on the others."""
        order = self._instructions(schedule, count)
        self._prepare(batches, order, training=True)
        actions: _Actions = {
            StageAction.receive_activation: self._receive_activation,
            StageAction.forward: self._forward,
            StageAction.send_activation: self._send_activation,
            StageAction.receive_gradient: self._receive_gradient,
            StageAction.backward: self._backward,
            StageAction.backward_input: self._backward_input,
            StageAction.backward_weight: self._backward_weight,
            StageAction.send_gradient: self._send_gradient,
        }
        begin, self._waited = time.perf_counter(), 0.0
        self._ended = begin
        with self._engine.closing_pieces():
            for instruction in self._begin(order, actions, training=True):
                actions[instruction.action]((instruction.chunk, instruction.micro_batch))
            if self._void:
                self._make_again(order, actions)
        self.times = self._ended - begin, self._waited
        return self._losses_in_order()

    def _losses_in_order(self) -> list[torch.Tensor]:
        return [self._losses[number] for number in sorted(self._losses)]

    def evaluate(
        self, batches: list[tuple[Any, Any]], count: int, compute_loss: bool
    ) -> tuple[list[torch.Tensor], list[Any] | None]:
        """Runs forwards alone; returns the last stage's losses and outputs."""
        schedule = PipelineSchedule.gpipe if self._chunks == 1 else PipelineSchedule.interleaved
        order = [each for each in self._instructions(schedule, count) if each.action in _FORWARD]
        self._prepare(batches, order, training=False)
        results: dict[int, tuple[Any, Any]] = {}  # by micro-batch: output and loss

        def look(piece: _Piece) -> None:
            output = self._output(piece)
            del self._inputs[piece]
            if not self._is_last(piece[0]):
                self._sent[piece] = None if self._is_lacking(piece[1], output) else output
                return
            loss = self._loss(output, piece[1]) if compute_loss and not self._is_lacking(piece[1], output) else None
            self._is_lacking(piece[1], output)  # also where the loss lacks a value
            results[piece[1]] = output, loss

        def send(piece: _Piece) -> None:
            self._send_activation(piece)
            del self._sent[piece]
            if piece[1] % self._stages == self._last and self._stage is not None:
                self._stage.flush()  # what was sent lies here until it is taken

        actions: _Actions = {
            StageAction.receive_activation: self._receive_activation,
            StageAction.forward: look,
            StageAction.send_activation: send,
        }
        for instruction in self._begin(order, actions, training=False):
            actions[instruction.action]((instruction.chunk, instruction.micro_batch))
        if self._any_lacked():
            self._void = set(range(count))
            self._make_again(order, actions)
        outputs = [results[number][0] for number in sorted(results)]
        losses = [results[number][1] for number in sorted(results)] if compute_loss else []
        return losses, outputs if self._here == self._last else None

    def _instructions(self, schedule: PipelineSchedule, count: int) -> list[StageInstruction]:
        return _C.stage_instructions(schedule, self._stages, count, self._here, self._chunks)

    def _prepare(self, batches: list[tuple[Any, Any]], order: list[StageInstruction], training: bool) -> None:
        self._number += 1
        self._batches, self._losses = batches, {}
        self._void.clear()
        if self._model.skips is not None:
            self._start.note(self._engine.module)
        self._model.begin()
        self._close_at([(each.chunk, each.micro_batch) for each in order if each.action in _OF_WEIGHTS])
        for held in (self._received, self._sent, self._gradients, self._inputs):
            held.clear()  # of a step that failed
        self._is_apart = any(each.action == StageAction.backward_weight for each in order)
        self._aside = SetAside(self._stage.add_product) if self._is_apart and self._stage and self._here > 0 else None

    def _close_at(self, backwards: list[_Piece]) -> None:
        """Notes which backwards the core is told of."""
        self._final = backwards[-1] if backwards else (0, 0)
        # A chunk without a trained parameter has no gradients to reduce. What would close last closes with the step.
        trained = trained_chunks(self._model)
        closing = [piece for piece in backwards if piece[0] in trained]
        self._closing = {*closing[:-1], self._final}

    def _begin(self, order: list[StageInstruction], actions: _Actions, training: bool) -> list[StageInstruction]:
        """Asks for the step's letters, and takes what is lent. Returns what is left to do of the list.

        Micro-batches of new kinds have passed all stages then, one by one.
        """
        if self._letters is None:
            return order
        lends = training or not self._ties.is_open  # else what was lent for a step under way stays
        due = Counter(self._ties.letters(training) if lends else {})
        first = {number: kind for kind, number in self._new_kinds()}
        rest = [each for each in order if each.micro_batch not in first or each.action not in _FORWARD]
        due.update(self._neighbour(each.chunk, _SOURCES[each.action])[0] for each in rest if each.action in _SOURCES)
        values = Counter(self._ties.letters(training=False) if lends else {})
        self._letters.begin(values if first else due, mixes=self._chunks > 1)
        if lends:
            self._ties.exchange_values(self._letters, self._number, training)
        if self._aside is not None:
            self._aside.begin(self._ties.lent())
        for number, kind in first.items():
            mine = [each for each in order if each.micro_batch == number and each.action in _FORWARD]
            self._pass_first(number, kind, mine, actions)
        if first:
            self._letters.begin(due - values, mixes=self._chunks > 1)
        return rest

    # -- forwards of new kinds ----------------------------------------------------------------------------------------

    def _new_kinds(self) -> Iterator[tuple[Any, int]]:
        """(kind, micro-batch) of the first forward of each kind that is new. All stages have the same."""
        if self._model.skips is None:
            return
        kinds = set()
        for number, (inputs, _) in enumerate(self._batches):
            kind = self._model.kind_of(inputs)
            if kind not in kinds and not self._model.skips.is_settled(kind):
                kinds.add(kind)
                yield kind, number

    def _pass_first(
        self, number: int, kind: Any, order: list[StageInstruction], actions: _Actions, follows: bool = False
    ) -> None:
        """A micro-batch passes all stages alone, again as long as one of them lacks a value of another.

        follows: after letters of this step.
        """
        assert self._letters is not None
        due = Counter(stage for stage in range(self._stages) if stage != self._here)
        due.update(self._neighbour(each.chunk, -1)[0] for each in order if each.action == _FORWARD[0])

        def forward() -> None:
            assert self._letters is not None
            if follows:
                self._letters.extend(due)
            else:
                self._letters.begin(due, mixes=self._chunks > 1)
            for each in order:
                actions[each.action]((each.chunk, each.micro_batch))

        self._until_settled(kind, number, forward)

    def _until_settled(self, kind: Any, number: int, forward: Callable[[], _Made]) -> _Made:
        """Makes a forward of a new kind, again as long as a stage lacks a value. Collective over the stages."""
        self._learns = True
        try:
            while True:
                undo = Undo(self._engine.module)
                made = forward()
                if self._settle(kind, number):
                    return made
                undo.restore()
                self._model.begin()
        finally:
            self._learns = False

    def _settle(self, kind: Any, number: int) -> bool:
        """Collective over the stages. Whether none of them lacked a value; else all know of it from now on."""
        assert self._model.skips is not None
        others = [stage for stage in range(self._stages) if stage != self._here]
        own = self._model.skips.lacking()
        for stage in others:
            self._send("what is lacking", number, own, stage)
        return self._model.skips.settle(kind, [own, *(self._receive("what is lacking", number, s) for s in others)])

    # -- forwards that need more than their kind did -------------------------------------------------------------------

    def _is_lacking(self, number: int, output: Any) -> bool:
        """Whether a micro-batch's forward counts for nothing, which the other stages hear by what it sends."""
        if self._model.skips is None or self._learns:
            return False
        if output is None or self._model.is_void():
            self._void.add(number)
        return number in self._void

    def _any_lacked(self) -> bool:
        """Whether a stage lacked a value in an evaluation. Collective over the stages."""
        if self._model.skips is None or self._stage is None:
            return False
        self._stage.meet()  # ranks that are behind still gather
        return any(self._stage.exchange([float(bool(self._void))], "ending an evaluation"))

    def _make_again(self, order: list[StageInstruction], actions: _Actions) -> None:
        """Makes all forwards of the step again, one by one, and the backwards of those that counted for nothing.

        All stages know which, by the gradients that did not come. Buffers and generators so pass the same states as if
        the kind had been known.
        """
        assert self._letters is not None
        void = sorted(self._void)
        self._void.clear()
        self._start.restore()
        self._model.begin()
        backwards = {number: [e for e in order if e.micro_batch == number and e.action in _BACKWARD] for number in void}
        self._close_at([(e.chunk, number) for number in void for e in backwards[number] if e.action in _OF_WEIGHTS])
        for number, (inputs, _) in enumerate(self._batches):
            kind = self._model.kind_of(inputs)
            self._model.open_again([kind])
            mine = [each for each in order if each.micro_batch == number and each.action in _FORWARD]
            self._pass_first(number, kind, mine, actions, follows=True)
            due = [each for each in backwards.get(number, ()) if each.action in _SOURCES]
            self._letters.extend(Counter(self._neighbour(each.chunk, _SOURCES[each.action])[0] for each in due))
            for each in backwards.get(number, ()):
                actions[each.action]((each.chunk, number))
            for held in (self._sent, self._inputs):
                for piece in [piece for piece in held if piece[1] == number]:
                    del held[piece]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _part(self, chunk: int) -> int:
        return chunk * self._stages + self._here

    def _is_last(self, chunk: int) -> bool:
        return self._part(chunk) == self._stages * self._chunks - 1

    def _neighbour(self, chunk: int, distance: int) -> tuple[int, int]:
        """(stage, chunk) of the part so far after that of an own chunk."""
        chunk, stage = divmod(self._part(chunk) + distance, self._stages)
        return stage, chunk

    def _kind(self, kind: str, chunk: int) -> str:
        return kind if self._chunks == 1 else f"{kind} for chunk {chunk}"

    def _receive(self, kind: str, micro_batch: int, source: int) -> Any:
        assert self._letters is not None
        begin = time.perf_counter()
        value = self._letters.receive(Subject(kind, micro_batch, self._number), source)
        self._waited += time.perf_counter() - begin
        return value

    def _send(self, kind: str, micro_batch: int, tree: Any, to: int) -> None:
        assert self._letters is not None
        self._letters.send(Subject(kind, micro_batch, self._number), tree, to)

    # -- instructions -------------------------------------------------------------------------------------------------

    def _receive_activation(self, piece: _Piece) -> None:
        source, _ = self._neighbour(piece[0], -1)
        self._received[piece] = self._receive(self._kind("activation", piece[0]), piece[1], source)

    def _output(self, piece: _Piece) -> Any:
        chunk, micro_batch = piece
        received = self._received.pop(piece) if self._part(chunk) > 0 else None
        inputs = self._batches[micro_batch][0] if self._batches else None
        self._inputs[piece] = tensors_in(received)
        return self._model.run_stage(self._forward_of_engine, inputs, handed(received), chunk)

    def _forward_of_engine(self, *args: Any, **kwargs: Any) -> Any:
        return Engine.forward(self._engine, *args, **kwargs)

    def _loss(self, output: Any, micro_batch: int) -> Any:
        loss = self._model.loss_of(output, self._batches[micro_batch][1])
        return None if loss is None else loss.clone()  # the model may add later losses to its own tensor

    def _forward(self, piece: _Piece) -> None:
        watch: AbstractContextManager[Any] = nullcontext() if self._aside is None else self._aside.forward()
        with watch:
            output = self._output(piece)
            if self._is_last(piece[0]) and not self._is_lacking(piece[1], output):
                output = self._loss(output, piece[1])
            self._sent[piece] = None if self._is_lacking(piece[1], output) else output

    def _send_activation(self, piece: _Piece) -> None:
        to, chunk = self._neighbour(piece[0], 1)
        self._send(self._kind("activation", chunk), piece[1], self._sent[piece], to)

    def _receive_gradient(self, piece: _Piece) -> None:
        source, _ = self._neighbour(piece[0], 1)
        self._gradients[piece] = self._receive(self._kind("gradient", piece[0]), piece[1], source)
        if self._gradients[piece] is None:
            self._void.add(piece[1])

    def _backward(self, piece: _Piece) -> None:
        self._differentiate(piece)
        if self._part(piece[0]) == 0:
            self._end(piece)

    def _differentiate(self, piece: _Piece) -> None:
        sent = self._sent.pop(piece)
        if piece[1] in self._void:
            return
        if self._is_final(piece):
            self._engine.await_the_end()
        if self._is_last(piece[0]):
            self._losses[piece[1]] = sent.detach()
            Engine.backward(self._engine, self._engine.scaled(sent))
        else:
            self._backward_from(sent, self._gradients.pop(piece), piece)
        self._ties.add_gradients()
        if self._part(piece[0]) == 0:
            del self._inputs[piece]

    def _backward_from(self, sent: Any, gradients: list[torch.Tensor | None], piece: _Piece) -> None:
        outputs = [tensor for tensor in tensors_in(sent) if tensor.requires_grad]
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        if self._is_final(piece) and self._aside is None:
            pairs += self._of_borrowers()
        self._backward_of_pairs(pairs)

    def _of_borrowers(self) -> Pairs:
        """Takes gradients from stages that borrow weights; returns those that go to autograd.

        The engine adds sums in fp32 to gradients in fp16 or bf16, where no hook of the program's asks for them.
        """
        assert self._stage is not None and self._letters is not None
        parameters, sums = self._ties.take_gradients(self._letters, self._number)
        pairs = zip(parameters, sums, strict=True)
        return [(each, gradient.to(each.dtype)) for each, gradient in pairs if not self._stage.join(each, gradient)]

    def _backward_of_pairs(self, pairs: Pairs) -> None:
        assert self._stage is not None
        if pairs:
            self._stage.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        self._stage.take_joining()

    def _send_gradient(self, piece: _Piece) -> None:
        inputs = self._inputs.pop(piece)
        is_void = piece[1] in self._void
        gradients = None if is_void else [tensor.grad for tensor in inputs if tensor.requires_grad]
        to, chunk = self._neighbour(piece[0], -1)
        self._send(self._kind("gradient", chunk), piece[1], gradients, to)
        if not self._is_apart:
            self._end(piece)

    def _backward_input(self, piece: _Piece) -> None:
        """The gradient that the stage before waits for. All those of parameters wait until they are complete."""
        if self._aside is None or piece[1] in self._void:
            self._differentiate(piece)
            return
        assert self._stage is not None
        self._stage.hold(piece[1])
        try:
            with self._aside.backward(piece[1]):
                self._differentiate(piece)
        finally:
            self._stage.hold(None)

    def _backward_weight(self, piece: _Piece) -> None:
        if self._aside is not None and piece[1] not in self._void:
            assert self._stage is not None
            besides: Pairs = self._of_borrowers() if self._is_final(piece) else []
            self._stage.give(piece[1])
            for pairs in self._aside.gradients(piece[1], besides):
                self._stage.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
            self._stage.take_joining()
            self._ties.add_gradients()
        self._end(piece)

    def _end(self, piece: _Piece) -> None:
        """After a backward, when its gradient is on its way, and the gradients of its weights are there."""
        if self._is_final(piece) and self._letters is not None:
            self._ties.send_gradients(self._letters, self._number)
        if piece == self._final:
            self._ended = time.perf_counter()  # the optimizer's step waits for all stages
            self.is_over = not self._void  # otherwise some are made again
        if self._closes(piece):
            if self._stage is not None:
                self._stage.note_backward()
            self._engine.close_piece()

    def _is_final(self, piece: _Piece) -> bool:
        """Whether it is the step's last backward. None is before those that are made again."""
        return piece == self._final and not self._void

    def _closes(self, piece: _Piece) -> bool:
        if not self._void:
            return piece in self._closing
        return piece[1] not in self._void and piece[0] in trained_chunks(self._model)
