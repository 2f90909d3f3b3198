# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Fabric's strategy: fabric.setup(model, optimizer) makes an engine; backward, step, save and load are the engine's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy

from deeptide._C import ConfigError
from deeptide.engine import Engine
from deeptide.lightning import _engines
from deeptide.optimizer import DeeptideOptimizer


class DeeptideFabricStrategy(DDPStrategy):
    """One engine for each model that is set up with its optimizer; several models may train in turns.

    config, stage, options: as DeeptideStrategy's; "gradient_clipping" in the configuration clips.
    """

    def __init__(self, config: Any = None, stage: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._keys = _engines.read_config(config, stage)
        self._engines: dict[int, Engine] = {}  # by their optimizer
        self._backward_sync_control = _AccumulatingControl(self)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Makes the engine; the model stays the program's own. Lightning gives and takes a scheduler from 2.6 on."""
        keys = _engines.with_precision(self._keys, str(self.precision.precision))
        engine, optimizer = _engines.make_engine(module, optimizers, keys)
        self._engines[id(optimizer)] = engine
        return module, [optimizer], *scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A model without an optimizer runs as it is."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError("set the model up with its optimizer: model, optimizer = fabric.setup(model, optimizer)")
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Not alone."""
        raise ConfigError("set the optimizer up with its model: model, optimizer = fabric.setup(model, optimizer)")

    def engine_of(self, module: torch.nn.Module) -> Engine | None:
        """The engine that trains `module`, which may be Fabric's wrapper of it."""
        inner = getattr(module, "_original_module", module)
        inner = getattr(inner, "_forward_module", inner)
        return next((engine for engine in self._engines.values() if engine.module is inner), None)

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Runs autograd. fp16 needs to know whose loss it is: with several models, fabric.backward(loss, model=…)."""
        engine = None if module is None else self.engine_of(module)
        if engine is None and len(self._engines) == 1:
            engine = next(iter(self._engines.values()))
        if engine is None or args or kwargs:
            super().backward(tensor, module, *args, **kwargs)
            return
        self.precision.pre_backward(tensor, module)
        engine.backward(tensor)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The engine's step. Collective."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return self._engines[id(optimizer)].step()

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Not here: the engine clips as it steps."""
        raise ConfigError('clip_gradients(max_norm=…): write "gradient_clipping" into the strategy\'s configuration')

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        """Not here."""
        raise ConfigError('clip_gradients(clip_val=…) is not supported; use "gradient_clipping", which clips by norm')

    # -- state --------------------------------------------------------------------------------------------------

    def _split(self, state: dict[str, Any]) -> tuple[Engine | None, dict[str, Any], list[str]]:
        """(the engine in the state, what is the program's own, the names that stand for the engine)."""
        found: Engine | None = None
        names, rest = [], {}
        for name, value in state.items():
            engine = self.engine_of(value) if isinstance(value, torch.nn.Module) else None
            if engine is None and isinstance(getattr(value, "optimizer", value), DeeptideOptimizer):
                engine = self._engines.get(id(getattr(value, "optimizer", value)))
            if engine is None:
                rest[name] = value
                continue
            if found is not None and found is not engine:
                raise ConfigError("a checkpoint holds one model that is trained; save the others in folders of theirs")
            found = engine
            names.append(name)
        return found, rest, names

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Writes a folder if the state holds a model that is trained, else a file. Collective."""
        engine, rest, _ = self._split(state)
        if engine is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise ConfigError("fabric.save(filter=…) is not supported; save engine_of(model).module_state_dict()")
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        _engines.save(engine, self.broadcast(path), rest)
        self.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restores the state's objects in place; returns what is left. Collective."""
        if not _engines.is_folder(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        program = _engines.read_program(path)
        engine, rest, _ = self._split(state if isinstance(state, dict) else {"": state})
        if engine is not None:
            engine.load_checkpoint(path, _engines.TAG, load_module_strict=strict)
        missing = [name for name in rest if name not in program]
        if strict and missing:
            raise KeyError(f"{path} holds nothing named {', '.join(missing)}; it has {', '.join(program)}")
        for name, value in rest.items():
            if name in program and hasattr(value, "load_state_dict"):
                value.load_state_dict(program.pop(name))
            elif name in program:
                state[name] = program.pop(name)
        return program

    def teardown(self) -> None:
        """Ends the engines; their models are whole afterwards."""
        for engine in self._engines.values():
            _engines.destroy(engine)
        self._engines.clear()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Importing deeptide.lightning registers the names."""


class _AccumulatingControl:
    """The object that fabric.no_backward_sync uses."""

    def __init__(self, strategy: DeeptideFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        engine = self._strategy.engine_of(module)
        return contextlib.nullcontext() if engine is None else _engines.accumulating(engine, enabled)
