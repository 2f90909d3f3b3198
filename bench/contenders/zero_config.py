# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The ds_config that DeepSpeed and Deeptide are both given; what it does not name is at each one's default."""

from settings import BATCH, BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY

# DeepSpeed's default of 5e8 elements puts this whole model into one bucket; smaller ones cost it less time and memory.
BUCKET_ELEMS = 5_000_000


def zero_config(stage, precision):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_ELEMS,
            "allgather_bucket_size": BUCKET_ELEMS,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
    }
