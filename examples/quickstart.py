# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest whole training program: `deeptide --num_ranks 2 examples/quickstart.py`; plain python: one rank."""

import torch
from torch import nn

import deeptide

config = {
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}

torch.manual_seed(0)
inputs = torch.randn(4096, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

engine, optimizer, loader, scheduler = deeptide.initialize(model=model, config=config, training_data=dataset)
for epoch in range(10):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
