# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Each way to do less work, on two ranks that share no memory: stages, types, a checkpoint and an exact resume."""

import dataclasses
from collections.abc import Callable

import models
import pytest
import torch
from conftest import run_processes
from torch import nn
from torch.nn import functional as F

import deeptide
from deeptide.compression import init_compression
from deeptide.efficiency import (
    PackedDataset,
    PackingCollator,
    block_diagonal_mask,
    convert_to_random_ltd,
    drop_layers,
)
from deeptide.efficiency.variable_batches import lr_scheduler_for_variable_batch_size
from deeptide.ops import linear_cross_entropy
from deeptide.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
from deeptide.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

ROWS, IGNORED = 4, -100


def batch(step, rank, rows=ROWS, length=6):
    """This rank's (tokens, targets), each (rows, length)."""
    return [part.chunk(2)[rank] for part in models.batches(1, 2 * rows, length=length, seed=step + 1)[0]]


class Cut(models.TinyModel):
    """Cuts its input to the curriculum's length."""

    def forward(self, tokens, targets, curriculum_seqlen=None):
        return super().forward(tokens[:, :curriculum_seqlen], targets[:, :curriculum_seqlen])


class Attending(models.TinyModel):
    """With attention within sequences before its blocks, and a loss over the rows that have a label."""

    def __init__(self):
        super().__init__(width=20)
        self.qkv = nn.Linear(20, 60)

    def attend(self, x, ids):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, block_diagonal_mask(ids, causal=True)).squeeze(1)

    def forward(self, tokens, targets, ids):
        x = self.attend(self.embed(tokens), ids)
        for block in self.h:
            x = block(x)
        return linear_cross_entropy(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten(), IGNORED)


class Sparse(Attending):
    """Its attention leaves out blocks of 16 tokens."""

    def __init__(self):
        super().__init__()
        self.sparse = SparseSelfAttention(FixedSparsityConfig(num_heads=2, block=16, num_local_blocks=2))

    def attend(self, x, ids):
        q, k, v = (part.view(*x.shape[:2], 2, 10).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.sparse(q, k, v).transpose(1, 2).flatten(2)


class Layered(models.TinyModel):
    """DeepSpeed's transformer layer in the place of the blocks, with all that it computes again."""

    def __init__(self):
        super().__init__(width=32, layers=1)
        options = dict.fromkeys(("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint"), True)
        sizes = {"hidden_size": 32, "heads": 2, "num_hidden_layers": 2, "initializer_range": 0.02}
        ratios = {"attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1}
        config = DeepSpeedTransformerConfig(**sizes, **ratios, **options)
        self.h = nn.ModuleList(DeepSpeedTransformerLayer(config) for _ in range(2))


def packed(step, rank):
    lengths = [3, 5, 2, 6, 4, 1, 3]
    samples = []
    for number, length in enumerate(lengths):
        tokens, targets = (part[0, :length] for part in batch(10 * step + number, rank))
        samples.append({"input_ids": tokens, "labels": targets})
    rows = PackedDataset(samples, lengths, 8)
    together = PackingCollator(8, causal=True, mask_dtype=None)([rows[i] for i in range(len(rows))])
    return together["input_ids"], together["labels"], together["sequence_ids"]


def some_labels(step, rank):
    tokens, targets = batch(step, rank)
    return tokens, torch.where(tokens % 3 == 0, targets, IGNORED), torch.zeros_like(tokens)


def long_batch(step, rank):
    tokens, targets = batch(step, rank, rows=2, length=64)
    return tokens, targets, torch.zeros_like(tokens)


def group(params, modules, **shared):
    return {
        "shared_parameters": {"enabled": True, **shared},
        "different_groups": {"a": {"params": params, "modules": modules}},
    }


LENGTHS = {"total_curriculum_step": 5, "difficulty_step": 2}
FALLING = group({"start_bits": 8, "target_bits": 3, "quantization_period": 1}, ["up"], rounding="stochastic")
ACTIVATION = group({"bits": 8}, ["down"], schedule_offset=2, range_calibration="dynamic")
PRUNING = group({"dense_ratio": 0.5}, ["up"], schedule_offset=1)
SCORED = group({"dense_ratio": 0.5}, ["down"], schedule_offset=2, method="topk", num_heads=4)


@dataclasses.dataclass
class Feature:
    sections: dict = dataclasses.field(default_factory=dict)
    model: type = models.TinyModel
    batch: Callable = batch
    prepare: Callable = lambda engine: None
    own: dict = dataclasses.field(default_factory=dict)  # of "deeptide"
    more: dict = dataclasses.field(default_factory=dict)  # arguments of initialize


FEATURES = {
    "lengths": Feature(
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 2,
                "max_difficulty": 6,
                "schedule_type": "fixed_linear",
                "schedule_config": LENGTHS,
            }
        },
        Cut,
    ),
    "layers": Feature(
        {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.5}},
        prepare=lambda engine: drop_layers(engine, engine.module.h),
    ),
    "tokens": Feature(
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": models.RANDOM_LTD}}},
        prepare=lambda engine: convert_to_random_ltd(engine, models.Block),
    ),
    "batches": Feature(
        batch=lambda step, rank: batch(step, rank, rows=(2, 4, 8)[step % 3]),
        more={"lr_scheduler": lambda optimizer: lr_scheduler_for_variable_batch_size(4, [2, 4, 8], None, optimizer)},
    ),
    "packing": Feature(model=Attending, batch=packed),
    "labels": Feature(model=Attending, batch=some_labels),
    "sparse attention": Feature(model=Sparse, batch=long_batch),
    "transformer layer": Feature(model=Layered),
    "bits of weights": Feature({"compression_training": {"weight_quantization": FALLING}}),
    "bits of inputs": Feature({"compression_training": {"activation_quantization": ACTIVATION}}),
    "pruning": Feature({"compression_training": {"sparse_pruning": PRUNING, "head_pruning": SCORED}}),
    "int8": Feature(own={"quantized_gradients": "int8"}),
    "int4": Feature(own={"quantized_gradients": "int4"}),
    "int4, fed back": Feature(own={"quantized_gradients": "int4", "quantized_error_feedback": True}),
}


def start(feature, stage, dtype):
    config = models.config(stage, ROWS, bf16=dtype == "bf16", deeptide=feature.own, **feature.sections)
    model = models.make_model(kind=feature.model)
    if "compression_training" in feature.sections:
        torch.manual_seed(7)
        init_compression(model, config)
    engine = deeptide.initialize(model=model, config=config, **feature.more)[0]
    feature.prepare(engine)
    return engine


def train(engine, feature, first, last):
    losses = []
    for step in range(first, last):
        loss = engine(*feature.batch(step, engine.world.rank))
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


def resume(name, stage, dtype, folder):
    """One rank. The generators of random numbers differ by rank, and a checkpoint brings them back."""
    feature = FEATURES[name]
    engine = start(feature, stage, dtype)
    torch.manual_seed(engine.world.rank)
    first = train(engine, feature, 0, 3)
    engine.save_checkpoint(folder)
    rest = train(engine, feature, 3, 6)
    again = start(feature, stage, dtype)
    again.load_checkpoint(folder)
    assert train(again, feature, 3, 6) == rest
    models.assert_same(models.everything(again), models.everything(engine))
    if engine._less_work is not None:
        assert again._less_work.state_dict() == engine._less_work.state_dict()
    assert again.get_lr() == engine.get_lr()
    assert all(loss == loss for loss in first + rest)


@pytest.mark.apart
@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", FEATURES)
def test_resumes_exactly(name, stage, dtype, tmp_path):
    run_processes(2, resume, name, stage, dtype, str(tmp_path))
