# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""torch DDP with fused AdamW; bf16 is autocast over fp32 parameters, DDP's usual mixed precision."""

import torch
from torch.nn.parallel import DistributedDataParallel

from task import fused_adamw


def setup(model, precision, size):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = fused_adamw(model.parameters(), size)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = wrapped(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
