# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The models of programs of meshes, cut and uncut."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from deeptide.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY = 11


class Block(nn.Module):
    """Changes its input and counts in a buffer; hands on one tensor."""

    def __init__(self, width, gated=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width, bias=False) if gated else None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden, mask=None, memory=None):
        if memory is not None:
            hidden = hidden + memory.mean(1, keepdim=True)
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        normed = self.norm(hidden)
        inner = F.gelu(self.up(normed))
        change = self.down(inner if self.gate is None else inner * self.gate(normed))
        return hidden + (change if mask is None else change * mask)


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, width))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Head(Embedding):
    def forward(self, hidden):
        return F.linear(hidden, self.weight)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def logits_of(embedding, hidden):
    return F.linear(hidden, embedding.weight)


class Half(nn.Module):
    """An encoder, or a decoder."""

    def __init__(self, embed, blocks):
        super().__init__()
        self.embed, self.blocks, self.norm = embed, nn.ModuleList(blocks), nn.Tanh()


class Blocks(nn.Module):
    """A plain model, which `parallel.pipeline` cuts."""

    def __init__(self, program):
        super().__init__()
        width = program["width"]
        self.embed = Embedding(width)
        if program["lent"]:
            self.places, self.scale = nn.Parameter(torch.empty(8, width)), nn.Parameter(torch.empty(width))
        self.norm, self.head = nn.LayerNorm(width), Head(width)
        if program["words"]:
            self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        blocks, first = [Block(width, program["gated"]) for _ in range(program["blocks"])], program["blocks"] // 2
        if program["pair"]:
            self.encoder, self.decoder = Half(self.embed, blocks[:first]), Half(self.embed, blocks[first:])
        else:
            self.blocks = nn.ModuleList(blocks)
        self._modules["norm"], self._modules["head"] = self._modules.pop("norm"), self._modules.pop("head")
        if program["tie"]:
            self.head.weight = self.embed.weight
        self.is_masked = not program.get("even")
        self.lends, self.recomputes = program["lent"], program["recompute"]
        self.evaluates = slice(*program.get("evaluates", (0, None)))
        self.skips, self.half, self.kept = program.get("skips", ""), program["blocks"] // 2, []
        for block in blocks if self.skips == "hooks" else ():  # as Transformers takes routers' logits
            block.norm.register_forward_hook(lambda module, given, output: self.kept.append(output.square().mean()))

    def skip(self, hidden, number):
        if self.skips == "mirror" and number >= self.half:
            return hidden + self.kept.pop() if self.kept else hidden
        self.kept += {"mirror": [hidden], "collect": [hidden.square().mean()]}.get(self.skips, [])
        return hidden

    def forward(self, tokens, labels=None):
        self.kept.clear()
        hidden = self.embed(tokens)
        mask = (tokens > 1).unsqueeze(-1) if self.is_masked else None
        if self.lends:
            hidden = hidden + self.places[: tokens.shape[1]]
        memory, number = None, 0
        if hasattr(self, "decoder"):
            chains = [self.encoder.blocks, self.decoder.blocks]
        else:
            chains = [self.blocks if self.training else self.blocks[self.evaluates]]
        for blocks in chains:
            for block in blocks:
                if self.recomputes and self.training:
                    hidden = torch.utils.checkpoint.checkpoint(block, hidden, mask, memory, use_reentrant=False)
                else:
                    hidden = block(hidden, mask, memory)
                hidden, number = self.skip(hidden, number), number + 1
            if hasattr(self, "decoder") and memory is None:
                memory, hidden = self.encoder.norm(hidden), self.decoder.embed(tokens.flip(1))
        hidden = self.norm(hidden)
        if self.skips in ("collect", "hooks"):
            hidden = hidden * (1 + torch.stack(self.kept).mean().to(hidden.dtype) / 10)
        logits = self.head(hidden * self.scale if self.lends else hidden)
        return logits if labels is None else (loss_of(logits, labels), logits)


class UncutLayers(nn.Module):
    """The layers of a PipelineModule under its names."""

    def __init__(self, program):
        super().__init__()
        for number in range(program["blocks"]):
            self.add_module(str(number + 1), Block(program["width"]))
        if program["tie"]:
            self.tied_modules = nn.ModuleDict({"embed": Embedding(program["width"])})
        else:
            self.add_module("0", Embedding(program["width"]))
            self.add_module(str(program["blocks"] + 1), Head(program["width"]))
        self.program = program

    def forward(self, tokens):
        embed = self.tied_modules["embed"] if self.program["tie"] else getattr(self, "0")
        hidden = embed(tokens)
        for number in range(self.program["blocks"]):
            hidden = getattr(self, str(number + 1))(hidden)
        return (
            logits_of(embed, hidden) if self.program["tie"] else getattr(self, str(self.program["blocks"] + 1))(hidden)
        )


def layers_of(program, stages, chunks, world):
    width, middle = program["width"], [LayerSpec(Block, program["width"]) for _ in range(program["blocks"])]
    first, last = LayerSpec(Embedding, width), LayerSpec(Head, width)
    if program["tie"]:
        first = TiedLayerSpec("embed", Embedding, width)
        last = TiedLayerSpec("embed", Embedding, width, forward_fn=logits_of)
    interval = {"activation_checkpoint_interval": 2 if program["recompute"] else 0}
    layers = [first, *middle, last]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, chunks=chunks, world=world, **interval)


def make(program, stages, chunks, world, seed):
    """The same values for every cut: a parameter's name draws them."""
    if program["form"] == "layers":
        model = layers_of(program, stages, chunks, world) if stages else UncutLayers(program)
    else:
        model = Blocks(program)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, name)))
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 3)
            parameter.requires_grad_(not any(part in name for part in program["frozen"]))
    return model
