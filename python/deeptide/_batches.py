# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A whole step, or an evaluation over several micro-batches, in one call: what becomes of a batch and of an output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from deeptide.data import RepeatingLoader

if TYPE_CHECKING:
    from deeptide.engine import Engine

LossFunction = Callable[[Any, Any], torch.Tensor]


def _call(engine: Engine, batch: Any, loss_fn: LossFunction | None) -> tuple[Any, Any]:
    """(the model's output, the labels that loss_fn takes)."""
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(engine.device), batch)
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if loss_fn is None or name != "labels"}
        return engine(**inputs), batch.get("labels")
    if not isinstance(batch, (tuple, list)):
        return engine(batch), None
    if loss_fn is None:
        return engine(*batch), None
    if len(batch) != 2:
        raise ValueError(f"a batch for loss_fn: got {len(batch)} values, expected (inputs, labels)")
    inputs, labels = batch
    return (engine(*inputs) if isinstance(inputs, (tuple, list)) else engine(inputs)), labels


def _loss(output: Any, labels: Any, loss_fn: LossFunction | None) -> torch.Tensor:
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


def _mean(engine: Engine, losses: list[torch.Tensor]) -> torch.Tensor:
    """Over micro-batches and ranks, the same on each rank."""
    mean = torch.stack([loss.detach().double().reshape(()) for loss in losses]).mean().item()
    return torch.tensor(engine._core.mean(mean), device=engine.device)


def _batches(engine: Engine, data_iter: Iterator[Any] | None, name: str) -> Iterator[Any]:
    if data_iter is not None:
        return data_iter
    if engine.training_dataloader is None:
        raise ValueError(f"{name}: got no iterator; give one, or training_data to initialize")
    if engine._own_batches is None:
        engine._own_batches = RepeatingLoader(engine.training_dataloader)
    return engine._own_batches


def train_batch(engine: Engine, data_iter: Iterator[Any] | None, loss_fn: LossFunction | None) -> torch.Tensor:
    """See Engine.train_batch."""
    if engine._core.has_gradients():
        raise ValueError("train_batch: there are gradients already; call step() for them, or zero_grad()")
    batches, count = _batches(engine, data_iter, "train_batch"), engine.gradient_accumulation_steps()
    engine.train()
    losses = []
    for index in range(count):
        loss = _loss(*_call(engine, _next(batches, index, count), loss_fn), loss_fn)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return _mean(engine, losses)


@contextlib.contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    mode = engine.module.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train(mode)


def eval_batch(
    engine: Engine,
    data_iter: Iterator[Any] | None,
    return_logits: bool,
    compute_loss: bool,
    reduce_output: str | None,
    num_micro_batches: int | None,
    loss_fn: LossFunction | None,
) -> Any:
    """See Engine.eval_batch."""
    if reduce_output not in ("avg", None):
        raise ValueError(f'eval_batch: reduce_output: got {reduce_output!r}, expected "avg" or None')
    count = num_micro_batches or engine.gradient_accumulation_steps()
    batches = _batches(engine, data_iter, "eval_batch")
    outputs, losses = [], []
    with _evaluating(engine):
        for index in range(count):
            output, labels = _call(engine, _next(batches, index, count), loss_fn)
            if return_logits or not compute_loss:
                outputs.append(output)
            if compute_loss:
                losses.append(_loss(output, labels, loss_fn))
    if not compute_loss:
        return outputs
    result = losses if reduce_output is None else _mean(engine, losses)
    return (result, outputs) if return_logits else result
