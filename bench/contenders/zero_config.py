# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The ds_config that DeepSpeed and Deeptide are both given; what it does not name is at each one's default."""

from settings import BETAS, EPSILON, WEIGHT_DECAY


def zero_config(stage, precision, size):
    return {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": size.bucket_elems,
            "allgather_bucket_size": size.bucket_elems,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": size.learning_rate, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
    }
