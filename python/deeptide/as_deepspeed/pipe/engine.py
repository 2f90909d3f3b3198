# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe.engine: the engine of one stage under DeepSpeed's names."""

from __future__ import annotations

from typing import Any, NoReturn

import deeptide.pipeline.engine
from deeptide.as_deepspeed.engine import DeepSpeedEngine, lay_grid
from deeptide.pipeline.errors import PipelineError


class PipelineEngine(deeptide.pipeline.engine.PipelineEngine, DeepSpeedEngine):  # type: ignore[misc, unused-ignore]
    """The engine of deepspeed.initialize for a PipelineModule, or for a model that "parallel" cuts into stages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grid = self._grid or lay_grid(self)

    def set_train_batch_size(self, train_batch_size: int) -> NoReturn:
        """Not here yet: the schedule has the configuration's number of micro-batches."""
        raise PipelineError(
            "set_train_batch_size: not supported yet with a pipeline; give gradient_accumulation_steps to initialize"
        )
