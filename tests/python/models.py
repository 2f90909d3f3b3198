# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small models and batches that several tests share."""

import os
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

DEVICE = "cpu"  # of what this module and its users make; test_suites_on_accelerator runs them on another one


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# The section random_ltd of TinyModel, whose blocks leave tokens out.
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 3,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [0, 2],
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 6,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 8, "seq_per_step": 1},
    },
}


class TinyModel(nn.Module):
    """Embedding, blocks and a head tied to the embedding; odd sizes, so that shards need padding."""

    def __init__(self, vocab=37, width=20, layers=3, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Wide(nn.Module):
    """Three blocks of 1.2 M parameters: states of several blocks of 4 MiB, and ends that are no whole block."""

    def __init__(self, width=1100, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


_seeding = threading.Lock()


def make_model(seed=0, kind=TinyModel, **sizes):
    """The same weights every time, also when ranks as threads, which share one generator, build at once."""
    with _seeding:
        torch.manual_seed(seed)
        model = kind(**sizes)
    return model if DEVICE == "cpu" else to_device(model, DEVICE)


def to_device(model, device):
    """Moves a model and keeps its ties, as `Module.to` does for the devices that torch knows; inputs follow it."""
    moved = {}

    def move_inputs(module, inputs):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            module._parameters[name] = moved.get(parameter)
        module._buffers.update({name: b if b is None else b.to(device) for name, b in module._buffers.items()})
        module.register_forward_pre_hook(move_inputs)
    return model


def batches(count, batch, vocab=37, length=6, seed=1):
    """`count` global batches: (tokens, targets), each (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, vocab, (batch, length + 1), generator=generator) for _ in range(count)]
    return [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in draw]


def everything(engine):
    """{"name/role": tensor} of masters and optimizer states, and the model's own state, whole. Collective."""
    roles = ["master", *engine.optimizer.info.state_roles()]
    names = [name for name, _ in engine.module.named_parameters()]
    state = {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in roles}
    return {**{name: value for name, value in state.items() if value is not None}, **engine.module_state_dict()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def memory():
    """How ranks of this host meet: see the markers `apart` and `both_ways` in conftest.py."""
    return {"shared_memory": os.environ.get("DEEPTIDE_TEST_APART") != "1"}


def config(stage, micro=2, gas=1, world=1, bf16=False, **extra):
    """A ds_config as a dict; `extra` updates it, zero keys under `zero`."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **extra.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "deeptide": {"comm_timeout": 60, **memory(), **extra.pop("deeptide", {})},
        **extra,
    }
