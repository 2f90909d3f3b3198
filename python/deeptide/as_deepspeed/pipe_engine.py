# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.pipe.engine: the engine of one stage under DeepSpeed's names."""

from __future__ import annotations

import deeptide.pipeline.engine
from deeptide.as_deepspeed.engine import DeepSpeedEngine


class PipelineEngine(deeptide.pipeline.engine.PipelineEngine, DeepSpeedEngine):  # type: ignore[misc, unused-ignore]
    """What deepspeed.initialize returns for a PipelineModule."""
