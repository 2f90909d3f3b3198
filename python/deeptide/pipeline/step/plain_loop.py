# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One micro-batch after another through all stages, as a program's own loop calls forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from deeptide.engine import Engine
from deeptide.pipeline.cutting.digest import digest
from deeptide.pipeline.errors import PipelineError
from deeptide.pipeline.passing.letters import handed, tensors_in
from deeptide.pipeline.passing.stand_ins import NUMBERS, content_of, describe, loss_in, stand_in, with_content
from deeptide.pipeline.step import batches as micro_batches
from deeptide.pipeline.step import shared_errors
from deeptide.pipeline.step.stage_run import StageRun

ADVICE = (
    "the program's own loop runs one micro-batch at a time through the pipeline, and stages wait for each other; "
    "engine.train_batch(iterator) computes the same and overlaps them"
)

_Made = TypeVar("_Made")


class _Forward(NamedTuple):
    """A forward whose backward is due: what came in, and what was handed on."""

    inputs: list[torch.Tensor]
    sent: list[torch.Tensor]


class PlainLoop(StageRun):
    """Each call is collective over the stages. A backward belongs to all forwards since the one before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._forwards: list[_Forward] = []
        self._owes = False  # gradients of tied weights that have not gone to their owner
        self._has_backward = False  # since the last step
        self._error: Exception | None = None  # of this stage, in the forward that runs

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], broadcasts: bool) -> Any:
        """The model's output on the last stage; on the others its loss or, if it `broadcasts`, copies.

        Errors: ValueError if their batches differ; on all stages, what one of them raises.
        """
        assert self._stage is not None and self._letters is not None
        micro_batches.agree(self._stage, "", [digest((args, kwargs), with_floats=True)])
        trains = torch.is_grad_enabled()
        self._number += 1
        if not self._ties.is_open:
            self._ties.exchange_values(self._letters, self._number, trains)
            self._ties.is_open = trains
        self._start.note(self._engine.module)
        assert self._model.skips is not None
        while True:
            is_settled = self._model.skips.is_settled(self._model.kind_of((args, kwargs)))
            received, output = self._pass((args, kwargs))
            told, lacked, failed = self._told(output, broadcasts, is_settled)
            if failed is not None:
                self._start.restore()
                self._model.begin()
                self._model.open_again([self._model.kind_of((args, kwargs))])  # stages behind have not looked at it
                self._raise(failed)
            if not lacked:
                break
            self._start.restore()
            self._model.begin()
            self._model.open_again([self._model.kind_of((args, kwargs))])
        if trains:
            sent = tensors_in(output) if self._here < self._last else []
            inputs = [tensor for tensor in tensors_in(received) if tensor.requires_grad]
            self._forwards.append(_Forward(inputs, [tensor for tensor in sent if tensor.requires_grad]))
        return self.share(output) if broadcasts else told

    def share(self, output: Any) -> Any:
        """The last stage's output on all stages, as far as it is tensors and plain values. After `meet`."""
        assert self._stage is not None
        if self._here < self._last:
            return with_content(self._receive("output", 0, self._last))
        for stage in range(self._last):
            self._send("output", 0, content_of(output), stage)
        self._stage.flush()
        return output

    def of_first(self, own: Any, others: Iterable[int]) -> Any:
        """The first stage's value, which it sends to the `others`: those stages call it, and the first one."""
        if self._here > 0:
            return self._receive("value of the first stage", 0, 0)
        for stage in others:
            self._send("value of the first stage", 0, own, stage)
        return own

    def exchange_tensors(self, own: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Sends the other stages tensors by name, one by one, and gives theirs. Collective over the stages."""
        assert self._stage is not None
        self._stage.meet()
        for stage in range(self._stages):
            if stage == self._here:
                for named in (*({name: tensor} for name, tensor in own), {}):
                    for other in range(self._stages):
                        if other != stage:
                            self._send("copied tensor", 0, named, other)
                    self._stage.flush()
                continue
            while named := self._receive("copied tensor", 0, stage):
                yield from named.items()

    def _pass(self, inputs: Any) -> tuple[Any, Any]:
        """(received, output) of this stage."""

        def forward() -> tuple[Any, Any]:
            received = self._receive("activation", 0, self._here - 1) if self._here > 0 else None
            self._error = None
            output = self._noting(lambda: self._model.run_stage(self._forward_of_engine, inputs, handed(received), 0))
            self._void.clear()
            output = None if self._is_lacking(0, output) else output
            if self._here < self._last:
                self._send("activation", 0, output, self._here + 1)
            return received, output

        kind = self._model.kind_of(inputs)
        assert self._model.skips is not None
        return forward() if self._model.skips.is_settled(kind) else self._until_settled(kind, 0, forward)

    def _noting(self, compute: Callable[[], _Made]) -> _Made | None:
        """The result, or None and a note of the error: the other stages are to hear of it, which go on with None."""
        try:
            return compute()
        except Exception as error:
            if not shared_errors.is_shared(error):
                raise
            self._error = error
            return None

    def _told(self, output: Any, broadcasts: bool, may_lack: bool) -> tuple[Any, bool, int | None]:
        """(the output or what stands for it, whether a stage lacked a value, the first stage that met an error).

        All stages have come so far then.
        """
        assert self._stage is not None
        is_last, own = self._here == self._last, [0.0] * NUMBERS
        if is_last and not self._void and output is not None:

            def look() -> list[float]:
                checked = output if broadcasts or isinstance(output, torch.Tensor) else loss_in(output)
                self._model.check_output(checked, in_step=may_lack)
                return own if self._is_lacking(0, output) else describe(output)

            own = self._noting(look) or own
        self._stage.meet()  # ranks that are behind still gather, and no longer once others exchange numbers
        each = self._stage.exchange([*own, float(bool(self._void)), float(self._error is not None)], "ending a forward")
        self._stage.flush()
        width = NUMBERS + 2
        failed = next((stage for stage, number in enumerate(each[width - 1 :: width]) if number), None)
        if failed is not None or any(each[NUMBERS::width]):
            return None, True, failed
        return output if is_last else stand_in(each[-width:-2], self._engine.device), False, None

    def _raise(self, failed: int) -> NoReturn:
        """Raises the error of a stage on all of them."""
        assert self._stage is not None
        error, self._error = self._error, None
        if failed == self._here:
            assert error is not None
            for stage in range(self._stages):
                if stage != failed:
                    self._send("error", 0, shared_errors.packed(error, self._engine.world.rank), stage)
            self._stage.flush()
        else:
            error = shared_errors.unpacked(failed, self._stages, self._receive("error", 0, failed))
        self.is_over = True
        raise error

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> torch.Tensor:
        """Takes all forwards since the last backward. Errors: PipelineError if there was none."""
        assert self._stage is not None and self._letters is not None
        forwards, self._forwards = self._forwards, []
        if not forwards:
            raise PipelineError(
                "backward: there was no forward with gradients since the last backward, which took all of them; call "
                "engine.backward() once for them, on the sum of their losses"
            )
        joins = self._engine.is_gradient_accumulation_boundary()
        if self._here == self._last:
            self._model.check_output(loss)
            result = Engine.backward(self._engine, loss, scale_wrt_gas=scale_wrt_gas)
        else:
            self._backward_of(forwards, joins)
            loss = loss.detach()
            result = loss / self._engine.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._ties.add_gradients()
        for number, forward in enumerate(forwards if self._here > 0 else ()):
            self._send("gradient", number, [tensor.grad for tensor in forward.inputs], self._here - 1)
        self._owes, self._has_backward = not joins, True
        if joins:
            self._ties.send_gradients(self._letters, self._number)
        self._stage.flush()
        return result

    def _backward_of(self, forwards: list[_Forward], joins: bool) -> None:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, forward in enumerate(forwards):
            gradients = self._receive("gradient", number, self._here + 1)
            pairs += [(out, grad) for out, grad in zip(forward.sent, gradients, strict=True) if grad is not None]
        if joins:
            pairs += self._of_borrowers()
        self._backward_of_pairs(pairs)

    def close(self) -> None:
        """Before a step() of the engine."""
        assert self._stage is not None and self._letters is not None
        if self._has_backward:
            self._stage.note_backward()
        if not self._engine.is_gradient_accumulation_boundary():
            return
        if self._owes:  # the program set the boundary after its backward
            self._backward_of_pairs(self._of_borrowers())
            self._ties.send_gradients(self._letters, self._number)
        self.forget()

    def forget(self) -> None:
        """Forgets what was computed since the last step."""
        self._forwards.clear()
        self._owes = self._ties.is_open = self._has_backward = False
