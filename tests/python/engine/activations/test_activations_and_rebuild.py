# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A policy for activations follows a model whose blocks change."""

import copy

import models
import torch
from test_activations import MICRO, RECOMPUTE, alone, auto

import deeptide
from deeptide.efficiency import convert_to_random_ltd


def test_blocks_that_come_later_are_recomputed_after_rebuild():
    config = models.config(1, activation_checkpointing=auto("1GiB"))
    model = models.make_model()
    engine = deeptide.initialize(model=model, config=config, world=alone())[0]
    tokens, targets = models.batches(1, MICRO)[0]
    for blocks in (3, 4):
        assert engine.activation_checkpointing().is_pending
        engine.backward(engine(tokens, targets))
        engine.step()
        assert len(engine.activation_checkpointing().blocks) == blocks
        model.h.append(models.Block(20))
        if blocks == 3:
            engine.rebuild()
    assert type(model.h[3]) is not models.Block
    engine.destroy()


def test_a_class_that_a_program_derives_after_the_start_outlives_rebuild():
    """Random-LTD derives one; without it layers would see all tokens again."""
    engine = deeptide.initialize(
        model=models.make_model(), config=models.config(1, activation_checkpointing=RECOMPUTE), world=alone()
    )[0]
    calls = []

    class Watched(type(engine.module.h[0])):
        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    block = engine.module.h[0]
    block.__class__ = Watched
    for _ in range(2):
        engine.backward(engine(*models.batches(1, MICRO)[0]))
        engine.step()
        engine.rebuild()
    assert isinstance(block, Watched)
    before = len(calls)
    engine.backward(engine(*models.batches(1, MICRO)[0]))
    assert len(calls) == before + 2  # once, and once in backward
    engine.destroy()
    assert type(block) is Watched


def test_copies_of_a_model_that_leaves_tokens_out_belong_to_no_engine(tmp_path):
    """Random-LTD copies its layers itself."""
    config = models.config(1, activation_checkpointing={"policy": "files", "nvme_path": str(tmp_path)})
    config["data_efficiency"] = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": models.RANDOM_LTD}}
    model = models.make_model()
    engine = deeptide.initialize(model=model, config=config, world=alone())[0]
    convert_to_random_ltd(engine, models.Block)
    tokens, targets = models.batches(1, MICRO)[0]
    engine.backward(engine(tokens, targets))
    engine.step()
    copies = [engine.snapshot(), copy.deepcopy(model)]
    expected = engine.module(tokens, targets)
    engine.destroy()
    for other in copies:
        assert type(other.h[0]).__name__ == "Block" and other.h[0] is not model.h[0]
        loss = other.requires_grad_(True).eval()(tokens, targets)
        loss.backward()
        assert torch.isfinite(loss) and loss.shape == expected.shape
