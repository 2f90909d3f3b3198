# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Answers an engine's questions: DeepSpeed's names for its configuration, its counters and the last step's outcome."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from deeptide import _C
from deeptide._C import Config, DataType, StepOutcome, StepResult

if TYPE_CHECKING:
    from deeptide.optimizer import DeeptideOptimizer
    from deeptide.tensor.team import Team


class Answers:
    """Answers that an engine gives at any time, without the other ranks."""

    world: _C.World
    optimizer: DeeptideOptimizer | None
    _core: _C.Engine
    _config: Config
    _outcome: StepOutcome | None
    _norm: float | None
    tensor_team: Team | None = None  # the ranks that share this one's layers
    _stage: _C.PipelineStage | None = None  # of a pipeline

    @property
    def config(self) -> Any:
        """The configuration, validated: a deeptide.Config."""
        return self._config

    @property
    def device(self) -> torch.device:
        """The device where the model computes."""
        return self._core.device()

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, the skipped ones included."""
        return self._core.global_steps()

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite gradient made void; "on_skipped" says what follows when many come in a row."""
        return self._core.skipped_steps()

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self._core.micro_steps()

    @property
    def global_samples(self) -> int:
        """Samples of all ranks so far."""
        return self._core.global_samples()

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self.world.size

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among those that train on different batches."""
        if self._stage is not None:
            return self._stage.data_rank
        return self.tensor_team.data_rank if self.tensor_team else self.world.rank

    @property
    def data_parallel_size(self) -> int:
        """How many ranks train on different batches."""
        if self._stage is not None:
            return self._stage.data_size
        return self.tensor_team.data_size if self.tensor_team else self.world.size

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks of each axis, outermost first: {"pipe": 2, "data": 4}; "tensor" where ranks share layers."""
        tensor = {"tensor": self.tensor_team.size} if self.tensor_team else {}
        share = self.data_parallel_size * tensor.get("tensor", 1)
        return {"pipe": self.world.size // share, "data": self.data_parallel_size, **tensor}

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._core.batch_sizes().train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self._core.batch_sizes().micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._core.batch_sizes().accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro-batch, accumulation steps)."""
        sizes = self._core.batch_sizes()
        return sizes.train, sizes.micro, sizes.accumulation

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._config.zero.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._config.zero.stage > 0

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self._config.bf16

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self._config.fp16

    def fp16_auto_cast(self) -> bool:
        """Whether the model's floating inputs are cast to fp16."""
        return self._config.fp16 and self._config.auto_cast

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows; false without fp16."""
        return self._config.fp16 and self._config.loss_scale == 0

    def loss_scale(self) -> float:
        """The configuration's fixed loss scale; 0 when it is dynamic. `cur_scale` is the one in force."""
        return self._config.loss_scale

    @property
    def cur_scale(self) -> float:
        """The factor of the next backward's loss; 1 without fp16."""
        return self._core.loss_scale()

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 when they are not."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Steps between two lines of progress; None for silence."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are timed."""
        return self._config.wall_clock_breakdown

    def get_lr(self) -> list[float]:
        """Each group's learning rate."""
        return [values["lr"] for values in self._hyperparameters()]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Each group's two betas, or its momentum; 0 for an optimizer with neither."""
        return [
            values.get("momentum", 0.0)
            if "beta1" not in values or values.get("use_muon", 0.0)
            else (values["beta1"], values["beta2"])
            for values in self._hyperparameters()
        ]

    def _hyperparameters(self) -> list[_C.Hyperparameters]:
        with self._synced():  # a schedule of the caller's has written into the groups after the step
            return [self._core.hyperparameters(group) for group in range(self._core.num_groups())]

    def get_global_grad_norm(self) -> float | None:
        """The last step's gradient norm before clipping; None before the first."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the last call of step() changed the parameters."""
        return self._outcome is not None and self._outcome.applied

    def was_step_skipped(self) -> bool:
        """Whether the last call of step() changed nothing because a gradient was not finite."""
        return self._outcome is not None and self._outcome.result == StepResult.non_finite

    def memory(self) -> list[_C.MemoryLine]:
        """The table of bytes on this rank: predicted, measured, and how many more a late peer may cost."""
        return self._core.memory()

    def summary(self) -> str:
        """The lines printed at start."""
        return self._core.summary()

    def torch_autocast_enabled(self) -> bool:
        """Whether `forward` runs under torch.autocast."""
        return self._config.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The lower type of autocast; None when it is off."""
        if self._config.autocast is None:
            return None
        return torch.float16 if self._config.autocast == DataType.fp16 else torch.bfloat16

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() applies."""
        return self._core.is_gradient_accumulation_boundary()

    def _synced(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the core has the hyper-parameters of the live groups; afterwards the groups have the core's."""
        return contextlib.nullcontext() if self.optimizer is None else self.optimizer.synced(self._core)
