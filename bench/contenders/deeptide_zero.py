# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Deeptide's ZeRO stages 0 to 3."""

import deeptide

from contenders.zero_config import zero_config


def setup(model, precision, size, stage, overlap_publish="auto", nvme=False):
    config = zero_config(stage, precision, size, nvme) | {"deeptide": {"overlap_publish": overlap_publish}}
    engine, *_ = deeptide.initialize(model=model, config=config)

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return step
