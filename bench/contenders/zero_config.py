# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The ds_config that DeepSpeed and Deeptide are both given; what it does not name is at each one's default."""

import output
from settings import BETAS, EPSILON, WEIGHT_DECAY

SWAP_FOLDER = output.ROOT / "runs" / "nvme"  # on the drive to be measured


def _with_states_in_files(config):
    """The settings of DeepSpeed's tutorials for speed: reads and writes overlap the update, in large blocks."""
    SWAP_FOLDER.mkdir(parents=True, exist_ok=True)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": str(SWAP_FOLDER),
        "buffer_count": 4,
        "pipeline_read": True,
        "pipeline_write": True,
    }
    config["aio"] = {
        "block_size": 1048576,
        "queue_depth": 16,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    }
    return config


def zero_config(stage, precision, size, nvme=False):
    config = {
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
    return _with_states_in_files(config) if nvme else config
