# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks draw alike, as dropout of what all of them have needs: ranks as processes with own seeds."""

import json
import os
from pathlib import Path

import models
import torch
from conftest import run_processes
from torch import nn

import deeptide


class Dropping(models.TinyModel):
    """Drops between its blocks what all ranks have alike."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.5)) for block in self.h)


SPECS = [
    {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
]


def train(folder, seeds):
    rank = int(os.environ["RANK"])
    model = models.make_model(kind=Dropping)
    settings = {
        **models.config(0, micro=2),
        "parallel": {"tensor": 2},
        "tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
    }
    torch.manual_seed(seeds[rank])
    engine = deeptide.initialize(model=model, config=settings)[0]
    losses = []
    for tokens, targets in models.batches(3, 2):
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    Path(folder, f"{rank}.json").write_text(json.dumps([losses, torch.rand(3).tolist()]))


def test_ranks_that_were_seeded_otherwise_drop_the_same_elements(tmp_path):
    run_processes(2, train, str(tmp_path), [1, 2])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
