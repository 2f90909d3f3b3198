# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The model that programs act on: small, and with one of everything that has ever mattered to an engine."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deeptide.activations import spill
from deeptide.compression import CompressionSchedule, init_compression
from deeptide.efficiency import PackedDataset, PackingCollator, block_diagonal_mask
from deeptide.ops import linear_cross_entropy

VOCAB = 7
ROWS = 4
ROW_LENGTH = 5  # of packed sequences
IGNORED = -100


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mixer(nn.Module):
    """Attention of each token to those before it in its sequence."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, ids):
        q, k, v = (part.view(*ids.shape, -1).float() for part in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v, ids).reshape(x.shape).to(x.dtype)

    def attend(self, q, k, v, ids):
        """Shapes: q, k, v (R, L, D), ids (R, L) -> (R, L, D). The oracle has its own."""
        mask = block_diagonal_mask(ids, causal=True)
        return F.scaled_dot_product_attention(*(part.unsqueeze(1) for part in (q, k, v)), mask).squeeze(1)


class AutoEncoder(nn.Module):
    """Two parameters over one memory, one the transpose of the other."""

    def __init__(self, width):
        super().__init__()
        self.encode = nn.Linear(width, 3, bias=False)
        self.decode = nn.Linear(3, width, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.t())

    def forward(self, x):
        return x + self.decode(torch.tanh(self.encode(x)))


class Subject(nn.Module):
    """An embedding, blocks that a caller picks and orders, a head; everything smooth, so that rounding stays small.

    `forward` rebinds one buffer and writes another in place. spec: see `programs.py`; route: the blocks, in order;
    recompute: None, reentrant or plain; targets: gives the loss over those that are not IGNORED, without logits of
    others; ids (R, L): the sequences of packed tokens (R * L,).
    """

    def __init__(self, spec):
        super().__init__()
        width = spec["width"]
        self.embed = nn.Embedding(VOCAB, width, sparse="sparse" in spec["extras"])
        self.h = nn.ModuleList(Block(width, spec["norm"]) for _ in range(spec["blocks"]))
        self.pair = AutoEncoder(width) if spec["tie"] == "transposed" else None
        self.mixer = Mixer(width) if spec.get("mixer") else None
        self.is_sequence = bool(spec.get("tokens"))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        if spec["tie"] == "head":
            self.head.weight = self.embed.weight
        extras = spec["extras"]
        self.scale = nn.Parameter(torch.tensor(1.0)) if "scalar" in extras else None
        self.unused = nn.Linear(3, 2) if "unused" in extras else None
        self.empty = nn.Parameter(torch.zeros(0)) if "empty" in extras else None
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens, route, recompute=None, targets=None, ids=None):
        x = self.embed(tokens)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.calls += 1
        if self.scale is not None:
            x = x * self.scale
        if self.mixer is not None:
            x = self.mixer(x, x.new_zeros(1, len(x), dtype=torch.int64) if ids is None else ids)
        x = x.unsqueeze(0) if self.is_sequence else x
        for i in route:
            block = self.h[i % len(self.h)]
            x = checkpoint(block, x, use_reentrant=recompute == "reentrant") if recompute else block(x)
        x = x.squeeze(0) if self.is_sequence else x
        if self.pair is not None:
            x = self.pair(x)
        x = self.norm(x)
        return self.head(x) if targets is None else self.masked_loss(x, targets)

    def masked_loss(self, hidden, targets):
        """In fp32, so that both ways to it round alike. The oracle has its own."""
        weight, bias = self.head.weight.float(), self.head.bias.float()
        return linear_cross_entropy(hidden.float(), weight, targets, IGNORED, bias=bias)


def activations_of(policy, folder):
    """The section of a configuration that recomputes blocks, all of them or as many as a budget needs, or has files."""
    if not policy:
        return {}
    if policy == "files":
        spill._LEAST_BYTES = 1  # also of tensors as small as these
        return {"activation_checkpointing": {"policy": policy, "nvme_path": f"{folder}/kept", "buffer_count": 4}}
    asked = {"policy": policy} if policy == "recompute" else {"policy": "auto", "memory": policy}
    return {"activation_checkpointing": asked}


def compression_of(spec):
    """The sections of a configuration that prune single weights, where the model's spec asks for it."""
    pruning = spec.get("pruning")
    if not pruning:
        return {}
    shared = {"enabled": True, "method": "l1", "schedule_offset": pruning["offset"]}
    group = {"params": {"dense_ratio": pruning["share"]}, "modules": ["up"]}
    return {
        "compression_training": {
            "sparse_pruning": {"shared_parameters": shared, "different_groups": {"up": group}},
        }
    }


def less_work_of(spec):
    """The sections that leave out layers, and tokens within layers, where the model's spec asks for it."""
    sections = {}
    if depth := spec.get("depth"):
        sections["progressive_layer_drop"] = {"enabled": True, **depth}
    if tokens := spec.get("tokens"):
        blocks = list(range(spec["blocks"]))
        growth = {"require_steps": tokens["steps"], "seq_per_step": 1}
        schedule = {"min_value": tokens["min"], "max_value": ROWS, "schedule_type": "fixed_linear"}
        section = {
            "enabled": True,
            "total_layer_num": len(blocks),
            "random_ltd_layer_num": len(blocks),
            "random_ltd_layer_id": blocks,
            "model_type": "decoder",
            "hidden_state_order": "batch_seq_dim",
            "random_ltd_schedule": {**schedule, "schedule_config": growth},
        }
        sections["data_efficiency"] = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}
    return sections


def schedule_of(spec, model):
    """When the model's pruning begins; None: it has none."""
    sections = compression_of(spec)
    return CompressionSchedule(model, {"train_batch_size": ROWS, **sections}) if sections else None


def make(spec, seed):
    """The same weights for the same seed; what `spec` freezes does not require grad."""
    torch.manual_seed(seed)
    model = Subject(spec)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in spec["frozen"]:
            parameter.requires_grad_(False)
    if spec.get("pruning"):
        init_compression(model, {"train_batch_size": ROWS, **compression_of(spec)})
    return model


def batch(seed, count=ROWS):
    """(tokens, targets), each (count,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (2, count), generator=generator).unbind()


def packed(seed, lengths):
    """(tokens, targets, ids) of sequences in rows: (R * L,), (R * L,), (R, L). lengths: a string of digits."""
    lengths = [int(length) for length in lengths]
    samples = []
    for number, length in enumerate(lengths):
        tokens, targets = batch(seed + 1000 * number, length)
        samples.append({"input_ids": tokens, "labels": targets})
    rows = PackedDataset(samples, lengths, ROW_LENGTH)
    together = PackingCollator(ROW_LENGTH, causal=True, mask_dtype=None)([rows[i] for i in range(len(rows))])
    return together["input_ids"].flatten(), together["labels"].flatten(), together["sequence_ids"]


def some_ignored(tokens, targets):
    """Targets of which all but the first and those of odd tokens are left out."""
    kept = tokens % 2 == 1
    kept[0] = True
    return torch.where(kept, targets, IGNORED)


class Samples(torch.utils.data.Dataset):
    """Numbers from 0 on, which `rows` makes a batch of."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        return number


def rows(numbers):
    """(tokens, targets), each (len(numbers),)."""
    numbers = torch.tensor(numbers)
    return numbers % VOCAB, (3 * numbers + 1) % VOCAB


def loss_of(logits, targets, kind):
    logits = logits.float()
    return F.cross_entropy(logits, targets) if kind == "cross" else logits.square().mean()


def optimized_names(model, spec):
    """The names given to the optimizer, in up to two groups; the first name of each distinct parameter."""
    names = [n for n, p in model.named_parameters() if p.requires_grad and n not in spec["left_out"]]
    if spec["groups"] == 1 or len(names) < 2:
        return [names]
    second = [n for n in names if n.endswith("bias") or "norm" in n]
    return [group for group in ([n for n in names if n not in second], second) if group]
