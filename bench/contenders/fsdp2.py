# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""torch FSDP2, one unit per block and one for the rest, with fused AdamW; bf16 by its MixedPrecisionPolicy."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from task import fused_adamw


def setup(model, precision, size):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Gradients are reduced in the compute type, the policy's default: half the bytes of an fp32 reduction.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = fused_adamw(model.parameters(), size)

    def step(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
