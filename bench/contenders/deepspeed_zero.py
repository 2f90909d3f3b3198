# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, with the optimizer that its AdamW key picks on a CPU: its own fused kernel.

Torch's fused AdamW and DeepSpeedCPUAdam in its place took the same CPU time within the noise.
"""

import deepspeed

from contenders.zero_config import zero_config


def setup(model, precision, stage):
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=zero_config(stage, precision),
        dist_init_required=False,
    )

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return step
