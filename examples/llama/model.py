# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A small Llama with LoRA adapters, and bytes of Python's standard library to tune it on: nothing is downloaded."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def make_rows(count):
    """`count` windows of bytes, as {"input_ids", "labels"}."""
    text = Path(json.__file__).read_bytes() + Path(json.__file__).with_name("decoder.py").read_bytes()
    starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(0))
    windows = [torch.tensor(list(text[start : start + LENGTH])) for start in starts.tolist()]
    return [{"input_ids": window, "labels": window} for window in windows]
