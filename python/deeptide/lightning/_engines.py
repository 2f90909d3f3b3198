# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The common part of both strategies: a configuration, an engine around a program's model and optimizer, folders."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

import deeptide
from deeptide._C import ConfigError
from deeptide._model.describe import whole_afterwards
from deeptide.engine import Engine

TAG = "checkpoint"  # the engine's part of a checkpoint folder
PROGRAM = "program.ckpt"  # Lightning's own part, beside it


def read_config(config: Any, stage: int | None) -> dict[str, Any]:
    """The configuration's keys. Lightning counts batches itself, so an accumulation of its own is an error."""
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    keys: dict[str, Any] = json.loads(json.dumps(config or {}))
    zero = keys.setdefault("zero_optimization", {})
    if stage is not None and zero.setdefault("stage", stage) != stage:
        raise ConfigError(f'stage={stage} contradicts "zero_optimization": {{"stage": {zero["stage"]}}}')
    zero.setdefault("stage", 2)
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        if keys.pop(key, "auto") not in ("auto", 1):
            raise ConfigError(f'"{key}": remove it; Lightning accumulates: Trainer(accumulate_grad_batches=…)')
    for key in ("optimizer", "scheduler"):
        if keys.pop(key, None):
            raise ConfigError(f'"{key}": remove it; configure_optimizers() or the script makes the {key}')
    if keys.get("train_micro_batch_size_per_gpu", "auto") == "auto":
        keys["train_micro_batch_size_per_gpu"] = 1  # only counts samples; batches may have any size
    keys.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default of 1 is not Lightning's
    return keys


def with_precision(keys: dict[str, Any], precision: str) -> dict[str, Any]:
    """The configuration with Lightning's precision: "true" types are the engine's, "bf16-mixed" is torch's autocast."""
    sections = {"bf16-true": "bf16", "16-true": "fp16"}
    if precision in sections:
        return {**keys, sections[precision]: {**keys.get(sections[precision], {}), "enabled": True}}
    if precision in ("32-true", "bf16-mixed"):
        return keys
    raise ConfigError(f"precision={precision!r}: expected '32-true', 'bf16-mixed', 'bf16-true' or '16-true'")


def make_engine(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], keys: dict[str, Any]
) -> tuple[Engine, Any]:
    """(the engine, its optimizer): the optimizer's groups stay the program's, so its schedules stay in force."""
    if len(optimizers) != 1:
        raise ConfigError(
            f"got {len(optimizers)} optimizers, expected one for each model; give several param groups to one"
        )
    engine, optimizer, _, _ = deeptide.initialize(model=model, optimizer=optimizers[0], config=keys)
    return engine, optimizer


def destroy(engine: Engine) -> None:
    """Ends the engine; its model is whole and the program's own afterwards. Collective at stage 3."""
    with whole_afterwards(engine.module):
        engine.destroy()


@contextlib.contextmanager
def accumulating(engine: Engine, enabled: bool = True) -> Iterator[None]:
    """Inside, stages 0 and 1 keep gradients on their rank: no step follows."""
    if not enabled:
        yield
        return
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(None)


def save(engine: Engine, folder: Any, program: Any) -> None:
    """Writes the engine's state and, by rank 0, the program's. Collective."""
    engine.save_checkpoint(folder, tag=TAG)
    if engine.global_rank == 0:
        torch.save(program, os.path.join(folder, PROGRAM))


def is_folder(path: Any) -> bool:
    """Whether `save` wrote there."""
    return os.path.isfile(os.path.join(path, TAG, "manifest.json"))


def read_program(folder: Any) -> dict[str, Any]:
    """The program's part. It may hold any object, so loading it may run code of the program that saved it."""
    loaded: dict[str, Any] = torch.load(os.path.join(folder, PROGRAM), map_location="cpu", weights_only=False)
    return loaded
