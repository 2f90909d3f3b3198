# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The models, the data and the configurations of runs that begin in DeepSpeed's pipelines and tensor-parallel ranks."""

import torch
from torch import nn

STEPS, FURTHER = 3, 4
BATCH, ACCUMULATION, VOCABULARY, WIDTH = 4, 2, 13, 6


class Scaled(nn.Module):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.tensor([0.75]))

    def forward(self, x):
        return x * self.gain.to(x.dtype) + torch.tanh(self.linear(x))


def layers_of(tied, specs):
    """`specs`: the module that has LayerSpec and TiedLayerSpec."""
    if tied:
        first = specs.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        last = specs.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=lambda m, x: x @ m.weight.t())
    else:
        first = specs.LayerSpec(nn.Embedding, VOCABULARY, WIDTH)
        last = specs.LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    inner = [nn.LayerNorm, Scaled, torch.tanh, Scaled, nn.LayerNorm]
    sizes = {nn.LayerNorm: (WIDTH,), Scaled: ()}
    return [first, *(specs.LayerSpec(kind, *sizes[kind]) if kind in sizes else kind for kind in inner), last]


def loss_of(outputs, labels):
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def batches(begin):
    """Endless micro-batches, from the one with number `begin` on."""
    number = begin
    while True:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (BATCH, 5), generator=generator)
        yield tokens, (5 * tokens) % VOCABULARY
        number += 1


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )


def config_of(stage, precision, **more):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-2,
                "warmup_num_steps": 9,
                "warmup_type": "linear",
            },
        },
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        **more,
    }


TENSOR = {"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}
PIPELINES = {
    **{
        f"pipeline-{stage}-{precision}": {"config": config_of(stage, precision), "tied": False}
        for stage in (0, 1)
        for precision in ("fp32", "bf16")
    },
    "pipeline-1-fp32-tied": {"config": config_of(1, "fp32"), "tied": True},
    "pipeline-0-bf16-tied": {"config": config_of(0, "bf16"), "tied": True},
    "pipeline-0-fp32-tied": {"config": config_of(0, "fp32"), "tied": True},
}
TENSORS = {
    f"tensor-{stage}-{precision}": {"config": config_of(stage, precision, **TENSOR)}
    for stage, precision in ((1, "fp32"), (2, "bf16"), (3, "fp32"))
}
CASES = {**PIPELINES, **TENSORS}
