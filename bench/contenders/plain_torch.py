# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Plain torch with fused AdamW: each rank trains a model of its own, both at once; no communication."""

import torch

from task import fused_adamw


def setup(model, precision, size):
    if precision == "bf16":
        model.to(torch.bfloat16)
    optimizer = fused_adamw(model.parameters(), size)

    def step(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
