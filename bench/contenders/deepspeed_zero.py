# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, with the optimizer that its AdamW key picks on a CPU: its own fused kernel.

Torch's fused AdamW and DeepSpeedCPUAdam in its place were not faster.
"""

import deepspeed

from contenders.zero_config import zero_config


# At its defaults stage 3 keeps models as small as these whole from forward to backward: quick, but not small.
# Lean, it holds about two blocks and gathers again in backward, as FSDP2 does.
def _lean(size):
    return {
        "stage3_max_live_parameters": size.live_elems,
        "stage3_max_reuse_distance": size.live_elems,
        "stage3_prefetch_bucket_size": size.live_elems // 2,
    }


def setup(model, precision, size, stage, lean=False, nvme=False):
    config = zero_config(stage, precision, size, nvme)
    if lean:
        config["zero_optimization"].update(_lean(size))
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
