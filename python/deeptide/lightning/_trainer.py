# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lightning's strategy: the Trainer's loop and callbacks, with Deeptide's engine for backward, step and states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

import deeptide
from deeptide._C import ConfigError
from deeptide.engine import Engine
from deeptide.lightning import _engines


class DeeptideStrategy(DDPStrategy):
    """One engine around the LightningModule while it is fitted.

    config: keys of ds_config.json, as a dict or a path; the Trainer's arguments give accumulation, clipping and
    precision. stage: of ZeRO; 2 where neither says one. `options`: DDPStrategy's, for processes and their group.
    Checkpoints are folders; `save_weights_only=True` writes one file as Lightning's own.
    """

    strategy_name = "deeptide"

    def __init__(self, config: Any = None, stage: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._keys = _engines.read_config(config, stage)
        self.engine: Engine | None = None
        self.optimizers: list[Any]

    # -- setup --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Makes the engine if the model is to be fitted; else the model runs as it is."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if trainer.gradient_clip_algorithm == "value":
            raise ConfigError("gradient_clip_algorithm='value' is not supported; clip by norm")
        self.model_to_device()
        self.setup_optimizers(trainer)
        keys = _engines.with_precision(self._keys, str(self.precision_plugin.precision))
        if trainer.gradient_clip_val is not None:
            keys = {**keys, "gradient_clipping": float(trainer.gradient_clip_val)}
        self.engine, optimizer = _engines.make_engine(self.lightning_module, self.optimizers, keys)
        self.optimizers = [optimizer]
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Ends the engine. The model is whole afterwards."""
        engine, self.engine = self.engine, None
        if engine is not None:
            _engines.destroy(engine)
        super().teardown()

    # -- a step -------------------------------------------------------------------------------------------------

    def _live(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("DeeptideStrategy: there is no engine outside of fit()")
        return self.engine

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs autograd, by the LightningModule's own method where it has one."""
        module = self.lightning_module
        if is_overridden("backward", module) or args or kwargs:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._live().backward(closure_loss)
        return self.precision_plugin.post_backward(closure_loss, module)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around backward passes that no step follows."""
        return _engines.accumulating(self._live())

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure (forward and backward), the hooks before a step, and the engine's step. Collective."""
        result = closure()
        self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
        self._live().step()
        return result

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine restores itself."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0's CPU while an engine has them. Collective."""
        if self.engine is None:
            return super().lightning_module_state_dict()
        return dict(self.engine.module_state_dict(only_rank=0))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: the engine saves its states, sharded."""
        return {} if self.engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder; weights alone go into one file, as Lightning writes it. Collective."""
        if self.engine is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        filepath = self.broadcast(filepath)
        program = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        _engines.save(self.engine, filepath, program)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The program's part of a folder; the engine takes its own. Files of Lightning's are read as always."""
        if not _engines.is_folder(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        strict = self.lightning_module.strict_loading
        with self._reading_engine() as engine:
            fitting = self.engine is not None
            engine.load_checkpoint(
                checkpoint_path,
                _engines.TAG,
                load_module_strict=strict,
                load_optimizer_states=fitting,
                load_lr_scheduler_states=False,
                load_module_only=not fitting,
            )
        # Lightning looks for the key; there is nothing to restore from it.
        return {**_engines.read_program(checkpoint_path), "optimizer_states": []}

    @contextlib.contextmanager
    def _reading_engine(self) -> Iterator[Engine]:
        """The engine, or one for as long as a model that is only evaluated takes its weights."""
        if self.engine is not None:
            yield self.engine
            return
        keys = {**self._keys, "zero_optimization": {"stage": 0}}
        engine = deeptide.initialize(model=self.lightning_module, config=keys)[0]
        yield engine
        _engines.destroy(engine)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a file's weights; a folder's are there already."""
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing from a folder: they are there already."""
        if checkpoint.get("optimizer_states"):
            raise ConfigError(
                "this checkpoint holds another strategy's optimizer states: load its weights with "
                "load_from_checkpoint() and fit without ckpt_path"
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Importing deeptide.lightning registers the names."""
