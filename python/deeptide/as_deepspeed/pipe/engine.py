# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe.engine: the engine of one stage under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import deeptide.pipeline.engine
from deeptide.as_deepspeed.engine import DeepSpeedEngine, lay_grid


class PipelineEngine(deeptide.pipeline.engine.PipelineEngine, DeepSpeedEngine):  # type: ignore[misc, unused-ignore]
    """The engine of deepspeed.initialize for a PipelineModule, or for a model that "parallel" cuts into stages."""

    _surface = "deepspeed.runtime.pipe.engine:PipelineEngine"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grid = self._grid or lay_grid(self)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step, as set_train_batch_size may have changed them."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of one on each rank."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def pipeline_parallelism(self) -> bool:
        """Whether the model is a PipelineModule, or cut into stages."""
        return True

    @property
    def is_data_parallel(self) -> bool:
        """Whether stages have several ranks that train on different data."""
        return self.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks share layers."""
        return self.mp_world_size > 1

    @property
    def prev_stage(self) -> int:
        """The stage before this one; of the first the last."""
        return (self.stage_id - 1) % self.num_stages

    @property
    def next_stage(self) -> int:
        """The stage after this one; of the last the first."""
        return (self.stage_id + 1) % self.num_stages

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Has no effect: tensors of any type go from stage to stage."""

    def _tell_boundary(self) -> None:
        """Nothing: the schedule closes its steps itself."""
