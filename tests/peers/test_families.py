# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Families of Transformers' models, as their configurations make them, train in bf16: at stage 3 to stage 0's bits."""

import json
from pathlib import Path

import pytest
import torch
from conftest import run_processes

BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = BLOCKS | {"num_key_value_heads": 4}
CONVOLUTIONS = {"hidden_sizes": [16, 32], "depths": [1, 1]}
IMAGE, TEXT, TOKENS = "ForImageClassification", "ForSequenceClassification", "ForCausalLM"
FAMILIES = {
    "ResNet": (IMAGE, CONVOLUTIONS | {"embedding_size": 16}),
    "RegNet": (IMAGE, CONVOLUTIONS | {"embedding_size": 16, "groups_width": 8}),
    "ConvNext": (IMAGE, CONVOLUTIONS | {"num_stages": 2}),
    "MobileNetV1": (IMAGE, {}),
    "MobileNetV2": (IMAGE, {}),
    "EfficientNet": (IMAGE, {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}),
    "Segformer": (IMAGE, {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}),
    "Swin": (IMAGE, {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}),
    "ViT": (IMAGE, BLOCKS | {"image_size": 64}),
    "Bert": (TEXT, BLOCKS),
    "Roberta": (TEXT, BLOCKS),
    "DebertaV2": (TEXT, BLOCKS),
    "Wav2Vec2": (TEXT, BLOCKS | {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16}),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Llama": (TOKENS, BLOCKS),
    "Qwen3": (TOKENS, GROUPED | {"head_dim": 8}),
    "Gemma2": (TOKENS, GROUPED | {"head_dim": 8}),
    "Mixtral": (TOKENS, GROUPED | {"num_local_experts": 2}),
    "Falcon": (TOKENS, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "Mamba": (TOKENS, {"hidden_size": 32, "num_hidden_layers": 2}),
}


def make(family):
    import transformers

    head, arguments = FAMILIES[family]
    labels = {"num_labels": 4} if head in (IMAGE, TEXT) else {}
    words = {} if head == IMAGE or family == "Wav2Vec2" else {"vocab_size": 100}
    config = getattr(transformers, f"{family}Config")(**arguments, **labels, **words)
    return getattr(transformers, family + head)(config)


def make_batch(family):
    head = FAMILIES[family][0]
    classes = torch.tensor([0, 1])
    if head == IMAGE:
        return {"pixel_values": torch.randn(2, 3, 64, 64).bfloat16(), "labels": classes}
    if family == "Wav2Vec2":
        return {"input_values": torch.randn(2, 4000).bfloat16(), "labels": classes}
    tokens = torch.randint(3, 100, (2, 8))
    return {"input_ids": tokens, "labels": classes if head == TEXT else tokens}


def train(folder, family, stage):
    import deeptide

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deeptide.initialize(model=make(family), config=config)
    rank = deeptide.comm.get_rank()
    torch.manual_seed(rank)
    batch, losses = make_batch(family), []
    for _ in range(4):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    Path(folder, f"{stage}-{rank}.json").write_text(json.dumps(losses))


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_in_bf16_at_stage_3_as_at_stage_0(family, tmp_path):
    losses = []
    for stage in (0, 3):
        run_processes(2, train, str(tmp_path), family, stage)
        losses.append([json.loads((tmp_path / f"{stage}-{rank}.json").read_text()) for rank in (0, 1)])
    assert losses[0] == losses[1]
    assert all(torch.isfinite(torch.tensor(each)).all() for each in losses)
