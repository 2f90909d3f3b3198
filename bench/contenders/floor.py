# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The compute floor: forward and backward alone, on both ranks at once; no communication and no update."""

import torch


def setup(model, precision, size):
    if precision == "bf16":
        model.to(torch.bfloat16)

    def step(x, y):
        loss = model(x, y)
        loss.backward()
        model.zero_grad()
        return loss

    return step
