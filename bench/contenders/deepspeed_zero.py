# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, with the optimizer that its AdamW key picks on a CPU: its own fused kernel.

Torch's fused AdamW and DeepSpeedCPUAdam in its place were not faster.
"""

import deepspeed

from contenders.zero_config import zero_config

# At its defaults stage 3 keeps a model as small as this one whole from forward to backward: quick, but not small.
# Lean, it holds about two blocks and gathers again in backward, as FSDP2 does.
LEAN = {
    "stage3_max_live_parameters": 7_000_000,
    "stage3_max_reuse_distance": 7_000_000,
    "stage3_prefetch_bucket_size": 3_500_000,
}


def setup(model, precision, stage, lean=False):
    config = zero_config(stage, precision)
    if lean:
        config["zero_optimization"].update(LEAN)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        dist_init_required=False,
    )

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return step
