# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A whole step, or an evaluation over several micro-batches, in one call: what becomes of a batch and of an output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from deeptide._process.reports import told
from deeptide.data import RepeatingLoader

if TYPE_CHECKING:
    from deeptide import _C
    from deeptide.engine import Engine

LossFunction = Callable[[Any, Any], torch.Tensor]


def arguments_of(batch: Any, loss_fn: LossFunction | None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(arguments of forward, keywords, the labels that loss_fn takes)."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if loss_fn is None or name != "labels"}
        return (), inputs, batch.get("labels")
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}, None
    if loss_fn is None:
        return tuple(batch), {}, None
    if len(batch) != 2:
        raise ValueError(f"a batch for loss_fn: got {len(batch)} values, expected (inputs, labels)")
    inputs, labels = batch
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}, labels


def _call(engine: Engine, batch: Any, loss_fn: LossFunction | None) -> tuple[Any, Any]:
    """(the model's output, the labels that loss_fn takes)."""
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(engine.device), batch)
    args, kwargs, labels = arguments_of(batch, loss_fn)
    return engine(*args, **kwargs), labels


def loss_of(output: Any, labels: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """The loss of a micro-batch. Errors: ValueError if it is no scalar."""
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(output, labels)
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)):
        loss = output[0]
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss of a micro-batch: got {got}, expected a scalar tensor; the model returns it, alone or as "
            "`loss`, or give loss_fn(output, labels)"
        )
    return loss


def _next(batches: Iterator[Any], index: int, count: int) -> Any:
    """The next batch. A StopIteration at the first one is the caller's."""
    try:
        return next(batches)
    except StopIteration:
        if index == 0:
            raise
        raise ValueError(
            f"the iterator ended after {index} of {count} micro-batches: drop the last incomplete batch of the data, "
            "or use deeptide.RepeatingLoader"
        ) from None


def batches_of(engine: Engine, data_iter: Iterator[Any] | None, name: str) -> Iterator[Any]:
    """The iterator that was given, or the training data without end. Errors: ValueError without either."""
    if data_iter is not None:
        return data_iter
    if engine.training_dataloader is None:
        raise ValueError(f"{name}: got no iterator; give one, or training_data to initialize")
    if engine._own_batches is None:
        engine._own_batches = RepeatingLoader(engine.training_dataloader)
    return engine._own_batches


@contextlib.contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Inside, the model is in evaluation mode, and there are no gradients."""
    mode = engine.module.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train(mode)


def mean_of(losses: list[torch.Tensor]) -> float:
    """Over micro-batches, in fp64."""
    return torch.stack([loss.detach().double().reshape(()) for loss in losses]).mean().item()


class WholeSteps:
    """The part of an engine that takes batches and runs what a step, or an evaluation, does with them.

    A pipeline's engine has other ways to train on micro-batches, to evaluate them and to tell losses.
    """

    if TYPE_CHECKING:
        module: torch.nn.Module
        _core: _C.Engine

        def gradient_accumulation_steps(self) -> int: ...

    @told
    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Trains on the micro-batches of one optimizer step; returns their mean loss over all ranks. Collective.

        `data_iter` yields micro-batches; without it they come from `training_data`, without end. A dictionary goes to
        forward as keywords, a tuple as arguments. The loss is the output, its `loss` or its first element; with
        `loss_fn`, a batch is (inputs, labels), and the loss is loss_fn(output, labels). Sets the training mode. Raises
        StopIteration where the iterator is at its end, and ValueError where it ends within the step.
        All stages of a pipeline read the same micro-batches; of a PipelineModule, whose batches are (inputs, labels) or
        dictionaries with "labels", the first and the last one alone read them.
        """
        if self._core.has_gradients():
            raise ValueError("train_batch: there are gradients already; call step() for them, or zero_grad()")
        return self._mean_loss(self._train_on(data_iter, self.gradient_accumulation_steps(), loss_fn))

    @told
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        loss_fn: LossFunction | None = None,
    ) -> Any:
        """Returns the mean loss of micro-batches over all ranks, in evaluation mode and without gradients. Collective.

        Batches and losses: as train_batch's. Takes `num_micro_batches`; absent: as many as a step takes. With
        reduce_output=None, the list of this rank's losses. With return_logits, (losses, list of this rank's outputs);
        with compute_loss=False, that list alone. `bcast_loss` changes nothing: every rank has the mean. In a pipeline
        the last stage has the outputs, the others None, or copies by "outputs": "broadcast"; all have the losses.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f'eval_batch: reduce_output: got {reduce_output!r}, expected "avg" or None')
        count = num_micro_batches or self.gradient_accumulation_steps()
        wants_outputs = return_logits or not compute_loss
        losses, outputs = self._evaluate_on(data_iter, count, loss_fn, compute_loss, wants_outputs)
        if not compute_loss:
            return outputs
        result: Any = self._each_loss(losses, count) if reduce_output is None else self._mean_loss(losses)
        return (result, outputs) if return_logits else result

    def _train_on(
        self: Any, data_iter: Iterator[Any] | None, count: int, loss_fn: LossFunction | None
    ) -> list[torch.Tensor]:
        """One optimizer step; returns the losses of its micro-batches."""
        batches = batches_of(self, data_iter, "train_batch")
        self.train()
        losses = []
        # An accumulation that was dropped in its middle leaves the count there: this step ends with its last batch.
        counts = self._core.batch_sizes().accumulation
        by_hand = count == counts and self._boundary is None and self._core.micro_steps() % counts > 0
        try:
            for index in range(count):
                if by_hand:
                    self._core.set_gradient_accumulation_boundary(index == count - 1)
                loss = loss_of(*_call(self, _next(batches, index, count), loss_fn), loss_fn)
                self.backward(loss)
                losses.append(loss.detach().clone())  # the model may add later losses to its tensor
                self.step()
        finally:
            if by_hand and not self._core.closed:
                self._core.set_gradient_accumulation_boundary(None)
        return losses

    def _evaluate_on(
        self: Any,
        data_iter: Iterator[Any] | None,
        count: int,
        loss_fn: LossFunction | None,
        compute_loss: bool,
        wants_outputs: bool,
    ) -> tuple[list[torch.Tensor], list[Any] | None]:
        """(losses, outputs) of micro-batches, as far as they are wanted."""
        batches = batches_of(self, data_iter, "eval_batch")
        outputs, losses = [], []
        with evaluating(self):
            for index in range(count):
                output, labels = _call(self, _next(batches, index, count), loss_fn)
                if wants_outputs:
                    outputs.append(output)
                if compute_loss:
                    losses.append(loss_of(output, labels, loss_fn).clone())
        return losses, outputs

    def _mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over micro-batches and ranks, the same on each rank."""
        return torch.tensor(self._core.mean(mean_of(losses)), device=self._core.device())

    def _each_loss(self, losses: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Those of this rank's micro-batches."""
        return losses
