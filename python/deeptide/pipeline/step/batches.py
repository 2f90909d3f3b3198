# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A step's micro-batches, on the stages that need them: inputs on the first, labels on the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deeptide import _C
from deeptide.pipeline.cutting.digest import digest
from deeptide.pipeline.errors import PipelineError


def split(batch: Any, has_loss_fn: bool) -> tuple[Any, Any]:
    """(inputs, labels) of a micro-batch."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels" or not has_loss_fn}
        return inputs, batch.get("labels")
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if has_loss_fn:
        got = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise ValueError(f"a micro-batch of a pipeline: got {got}, expected (inputs, labels), or set_batch_fn()")
    return batch, None


def take(
    batches: Iterator[Any] | None,
    count: int,
    batch_fn: Callable[[Any], Any] | None,
    apart: Callable[[Any], tuple[Any, Any]],
    device: Any,
) -> tuple[list[tuple[Any, Any]], str]:
    """Takes `count` micro-batches `apart`; returns them, or what was wrong: "end", or a text.

    Without an iterator batch_fn is given None: it may take what a rank that shares its layers has read.
    """
    taken: list[tuple[Any, Any]] = []
    missing = "the stages that read batches need an iterator: give one, or training_data to initialize"
    if batches is None and batch_fn is None:
        return taken, missing
    for index in range(count):
        try:
            batch = None if batches is None else next(batches)
        except StopIteration:
            if index == 0:
                return taken, "end"
            return taken, (
                f"the iterator ended after {index} of {count} micro-batches: drop the last incomplete batch of the "
                "data, or use deeptide.RepeatingLoader"
            )
        try:
            batch = batch if batch_fn is None else batch_fn(batch)
        except Exception as error:
            if batches is not None:
                raise
            return taken, f"{missing}; the batch_fn, which was given None, raised {type(error).__name__}: {error}"
        taken.append(apart(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)))
    return taken, ""


_CODES = ("", "end", "failed")
_SAVES = 3  # another stage saves in the handler of an exception
_MARKS = 2  # digests that travel with a code: of inputs and of labels
_NOTHING = -1  # instead of a digest
_BEGIN = "beginning a forward, a step or a save"


def agree_to_save(stage: _C.PipelineStage, in_handler: bool) -> None:
    """Collective over the stages, before a save. Those that begin a step meanwhile raise, and may come here too."""
    while True:
        codes = [
            int(code) for code in stage.exchange([float(_SAVES), *[float(_NOTHING)] * _MARKS], _BEGIN)[:: 1 + _MARKS]
        ]
        if all(code == _SAVES for code in codes):
            return
        if not in_handler:
            other = next(number for number, code in enumerate(codes) if code != _SAVES)
            raise PipelineError(f"save_checkpoint: stage {other} begins a step meanwhile; all stages save together")


def marks(taken: list[tuple[Any, Any]]) -> list[int]:
    """Digests of the inputs and of the labels that were taken; a program may leave out those a stage does not need."""
    parts = ([inputs for inputs, _ in taken], [labels for _, labels in taken])
    return [_NOTHING if all(each is None for each in part) else digest(part, with_floats=True) for part in parts]


def agree(stage: _C.PipelineStage | None, problem: str, own: list[int]) -> None:
    """Collective over the stages: all of them go on, or all raise. Errors: StopIteration; ValueError.

    own: digests of what was taken, which are equal on all stages that took it.
    """
    code = _CODES.index(problem) if problem in _CODES else 2
    codes, parts = [code], []
    if stage is not None:
        own = [*own, *[_NOTHING] * (_MARKS - len(own))]
        width = 1 + _MARKS
        values = [int(each) for each in stage.exchange([float(code), *map(float, own)], _BEGIN)]
        codes, parts = values[::width], [values[place::width] for place in range(1, width)]
        if _SAVES in codes:
            raise _C.SaveMeetsStepError(
                f"stage {codes.index(_SAVES)} handles an exception and calls save_checkpoint(), for which all ranks "
                "are needed. Nothing was changed on this rank"
            )
        stage.begin_step()
    if problem and problem != "end":
        raise ValueError(problem)
    if 2 in codes:
        raise ValueError(f"stage {codes.index(2)} has no micro-batches for this step; see its error")
    if 1 in codes:
        raise StopIteration
    for part in parts:
        readers = [other for other, its in enumerate(part) if its != _NOTHING]
        for other in readers:
            if part[other] != part[readers[0]]:
                raise ValueError(
                    f"the micro-batches of stages {readers[0]} and {other} differ: all stages of a pipeline read the "
                    "same ones, those of engine.data_parallel_rank among engine.data_parallel_size. What draws random "
                    "numbers for a batch outside train_batch() draws alike if all ranks seed torch, random and NumPy "
                    "alike for it"
                )
