# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of one stage: runs the schedule's list of instructions, micro-batch by micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from deeptide import _C, _batches
from deeptide._C import Config, ConfigError, PipelineSchedule, StepOutcome
from deeptide._reports import told
from deeptide.data import RepeatingLoader
from deeptide.engine import Engine
from deeptide.pipeline import batches as micro_batches
from deeptide.pipeline.module import PipelineModule
from deeptide.pipeline.stage_run import StageRun

_SCHEDULES = {"1f1b": PipelineSchedule.one_f_one_b, "gpipe": PipelineSchedule.gpipe}


class PipelineError(RuntimeError):
    """A method of an engine that a stage of a pipeline does not have."""


def check_mesh(config: Config, model: torch.nn.Module) -> int:
    """The number of stages. Errors: ConfigError if the configuration has another one than the model."""
    asked = json.loads(_C.config_section(config, "parallel"))["pipeline"]
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    if asked is None or asked == stages:
        return stages
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"parallel.pipeline is {asked}, and the model is no PipelineModule: give its layers to "
            f"deeptide.pipeline.PipelineModule(layers, num_stages={asked}); other models have one stage yet"
        )
    raise ConfigError(f"parallel.pipeline is {asked}, and the PipelineModule has {stages} stages; leave the key out")


class PipelineEngine(Engine):
    """Trains a PipelineModule. Made by `deeptide.initialize`; unknown attributes are the model's."""

    module: PipelineModule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stage = self._core.stage() if self.module.num_stages > 1 else None
        self._schedule = _SCHEDULES[json.loads(_C.config_section(self._config, "parallel"))["schedule"]]
        self._batch_fn: Callable[[Any], Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._run = StageRun(self, self._stage, self.module)

    # -- where this rank is ---------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """This rank's stage, from 0."""
        return self.module.stage_id

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._core.batch_sizes().accumulation

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among those of its stage, which train on other batches."""
        return self.world.rank if self._stage is None else self._stage.data_rank

    @property
    def data_parallel_size(self) -> int:
        """Ranks of each stage."""
        return self.world.size if self._stage is None else self._stage.data_size

    def is_first_stage(self) -> bool:
        """Whether this stage takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage_id == self.num_stages - 1

    def is_pipe_parallel(self) -> bool:
        """Whether there is more than one stage."""
        return self.num_stages > 1

    # -- data -----------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """The batches of train_batch() without an iterator, begun anew at their end."""
        self._iterator = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """The batches of train_batch() without an iterator."""
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Applies to each micro-batch before it is taken apart into (inputs, labels)."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Has no effect: activations may change their shapes at any time."""

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The module's."""
        return self.module.get_additional_losses()

    def _take(self, data_iter: Iterator[Any] | None, count: int, name: str) -> list[tuple[Any, Any]]:
        """This step's micro-batches; none on stages that need none. All stages raise if one has none."""
        problem = ""
        taken: list[tuple[Any, Any]] = []
        if self.is_first_stage() or self.is_last_stage():
            batches = data_iter if data_iter is not None else self._iterator
            if batches is None and self.training_dataloader is not None:
                batches = _batches._batches(self, None, name)
            has_loss_fn = self.module.loss_fn is not None
            taken, problem = micro_batches.take(batches, count, self._batch_fn, has_loss_fn, self._core.device())
        micro_batches.agree(self._stage, problem)
        return taken

    # -- steps ----------------------------------------------------------------------------------------------------

    @told
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:  # type: ignore[override]
        """Trains on the micro-batches of one optimizer step; returns their mean loss, on every rank. Collective.

        data_iter yields (inputs, labels), or dictionaries with "labels", equal on the first and the last stage, which
        alone read it; without it they come from set_dataloader(), set_dataiterator() or training_data. Raises
        StopIteration on all stages where it is at its end, and ValueError where it ends within the step.
        """
        if self._core.has_gradients():
            raise ValueError("train_batch: there are gradients already; call zero_grad()")
        taken = self._take(data_iter, self.micro_batches, "train_batch")
        self.module.train()
        return self._mean(self._run.train(self._schedule, taken, self.micro_batches))

    @told
    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of micro-batches, in evaluation mode and without gradients. Collective.

        Batches: as train_batch's; `num_micro_batches` of them, absent: as many as a step takes. With
        reduce_output=None, the list of the losses of this rank's pipeline. With return_logits, (losses, outputs): a
        list on the last stage, None on the others; with compute_loss=False, that alone. Every rank has the loss.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f'eval_batch: reduce_output: got {reduce_output!r}, expected "avg" or None')
        count = num_micro_batches or self.micro_batches
        taken = self._take(data_iter, count, "eval_batch")
        mode = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses, outputs = self._run.evaluate(taken, count, compute_loss)
        finally:
            self.module.train(mode)
        if not compute_loss:
            return outputs
        result: Any = self._mean(losses) if reduce_output == "avg" else self._all(losses, count)
        return (result, outputs) if return_logits else result

    def _all(self, losses: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """The last stage's losses, on every stage."""
        if self._stage is None:
            return losses
        values = self._stage.exchange([loss.item() for loss in losses] or [0.0] * count)
        return [torch.tensor(value, device=self._core.device()) for value in values[-count:]]

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Over micro-batches and ranks, the same on each rank."""
        mean = 0.0
        if losses:
            mean = torch.stack([loss.detach().double().reshape(()) for loss in losses]).mean().item()
            mean = self._core.mean(mean)
        if self._stage is not None:
            mean = self._stage.exchange([mean])[-1]
        return torch.tensor(mean, device=self._core.device())

    def close_micro_batch(self) -> StepOutcome:
        """After a micro-batch's backward: reduces, and at a step's last one steps. Collective over the stage."""
        return Engine.step(self)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        raise PipelineError("forward: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        raise PipelineError("forward: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        raise PipelineError("backward: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here."""
        raise PipelineError("step: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def join(self) -> NoReturn:
        """Not here."""
        raise PipelineError("join: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def rebuild(self) -> NoReturn:
        """Not here."""
        raise PipelineError("rebuild: a pipeline's engine runs all stages by train_batch() and eval_batch()")

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here yet."""
        raise PipelineError("save_16bit_model: not supported yet with a pipeline; save a checkpoint and export that")
