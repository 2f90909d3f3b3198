# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model, the data and the configurations of runs that begin under DeepSpeed and end here."""

import torch
from torch import nn

STEPS, FURTHER = 5, 10
BATCH, LENGTH, VOCABULARY, WIDTH = 4, 5, 13, 6
CLIENT_STATE = {"epoch": 3, "rates": (0.5, 2), "nested": {"names": ["a", "b"], "best": None, "done": False}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.outer = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Model(nn.Module):
    """Odd sizes, a frozen parameter, a buffer and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("gain", torch.tensor([0.75, 1.25, 1.0]))
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) * self.gain.sum() + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(7)
    return Model()


def parameters_of(model, groups):
    """One group, or one with and one without weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not groups:
        return trained
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    rest = [parameter for parameter in trained if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]


def batch_of(number, part):
    generator = torch.Generator().manual_seed(1000 * number + part)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    noise = torch.randint(2, (BATCH, LENGTH), generator=generator)
    return tokens, (5 * tokens + noise) % VOCABULARY


def loss_of(model, tokens, targets):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 9, "warmup_type": "linear"},
}


def config_of(stage, precision, optimizer=None, **more):
    types = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 1}
    types["fp16"] = {"fp16": fp16}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.5,
        # DeepSpeed's own linear layer at stage 3 rounds sums in 16 bits in another order than torch's.
        "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        "optimizer": optimizer or ADAMW,
        "scheduler": SCHEDULE,
        **types[precision],
        **more,
    }


def case_of(stage, precision, groups=False, universal=False, **more):
    """`same`: all ranks see one batch, so that sums over ranks round nothing in 16 bits."""
    return {
        "config": config_of(stage, precision, **more),
        "groups": groups,
        "same": precision != "fp32",
        "universal": universal,
    }


CASES = {
    **{f"stage{stage}-{kind}": case_of(stage, kind) for stage in (0, 1, 2, 3) for kind in ("fp32", "bf16", "fp16")},
    "stage1-groups": case_of(1, "fp32", groups=True, universal=True),
    "stage2-universal": case_of(2, "bf16", universal=True),
    "stage3-universal": case_of(3, "fp32", universal=True),
}
