# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models in small whose later blocks, or loss, use what earlier blocks returned; each an edit of families.train."""

import families
import torch
import transformers
from torch import nn
from torch.nn import functional as F

_MOE = {  # grouped products in bf16 take rows of whole 16 bytes
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}


def _made(make):
    def edit(model):
        with families._seeding:
            torch.manual_seed(3)
            return make()

    return edit


class Unet(nn.Module):
    """Numbered blocks; those of the second half take the outputs of the mirrored ones."""

    def __init__(self, half=3):
        super().__init__()
        self.embed = nn.Embedding(families.VOCABULARY, 12)
        self.blocks = nn.ModuleList(UnetBlock(12 if i < half else 24) for i in range(2 * half))
        self.head = nn.Linear(12, families.VOCABULARY)

    def forward(self, tokens, labels):
        hidden, skips = self.embed(tokens), []
        for number, block in enumerate(self.blocks):
            if 2 * number < len(self.blocks):
                hidden = self.call(block, hidden)
                skips.append(hidden)
            else:
                hidden = self.call(block, hidden, skips.pop())
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def call(self, block, *given):
        return block(*given)


class UnetBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 12)

    def forward(self, hidden, skip=None):
        hidden = hidden if skip is None else torch.cat([hidden, skip], -1)
        return self.mix(F.gelu(self.norm(hidden)))


class AddsSkips(Unet):
    """The program adds the skips between the blocks, in both halves scaled by what it has computed of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(UnetBlock(12) for _ in range(6))

    def forward(self, tokens, labels):
        hidden, skips = self.embed(tokens), []
        for number, block in enumerate(self.blocks):
            if number >= 3:
                hidden = hidden + skips.pop()
            hidden = block(hidden)
            if number < 3:
                skips.append(hidden * hidden.square().mean())
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Collects(nn.Module):
    """Does like a router's loss: something of each block goes into the loss, besides a count of forwards."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(families.VOCABULARY, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, families.VOCABULARY)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens, labels):
        self.count += 1
        self.kept = []
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = self.call(block, hidden).tanh()
            self.keep(hidden)
        logits = self.head(hidden * torch.stack(self.kept).mean())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * (1 + self.count / 100)

    def call(self, block, hidden):
        return block(hidden)

    def keep(self, hidden):
        self.kept.append(hidden.mean())


class CollectsByHooks(Collects):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, inputs, output: self.kept.append(output.tanh().mean()))

    def keep(self, hidden):
        pass


class CollectsInside(Collects):
    """Hooks on a module inside each block compute what the loss takes, and autograd keeps something for that."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(UnetBlock(12) for _ in range(4))
        for block in self.blocks:
            block.norm.register_forward_hook(lambda module, inputs, output: self.kept.append(output.square().mean()))

    def forward(self, tokens, labels):
        self.kept = []
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden * torch.stack(self.kept).mean()).flatten(0, 1), labels.flatten())


class HandsTheFirst(Unet):
    """All later blocks are handed what the first returns, and the loss takes something of a module inside each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(UnetBlock(12 if i == 0 else 24) for i in range(6))
        for block in self.blocks:
            block.norm.register_forward_hook(lambda module, inputs, output: self.kept.append(output.square().mean()))

    def forward(self, tokens, labels):
        self.kept = []
        first = hidden = self.blocks[0](self.embed(tokens))
        for block in self.blocks[1:]:
            hidden = block(hidden, first)
        return F.cross_entropy(self.head(hidden * torch.stack(self.kept).mean()).flatten(0, 1), labels.flatten())


class AddsTheFirst(Collects):
    """A long skip around all blocks, of what a module before them returns."""

    def forward(self, tokens, labels):
        first = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return F.cross_entropy(self.head(hidden + first).flatten(0, 1), labels.flatten())


class Looks(Collects):
    """Python branches on a value, and the embedding is written into a tensor of the program's."""

    def forward(self, tokens, labels):
        embedded = self.embed(tokens)
        hidden = torch.zeros(*tokens.shape, 12, dtype=embedded.dtype)
        hidden[:, 1:] = embedded[:, 1:]
        hidden = hidden if hidden.mean() > 100 else -hidden
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class KeepsInside(Collects):
    """Blocks keep a value of a module inside as an attribute, of which the loss takes the sum."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(4))

    def keep(self, hidden):
        self.kept = [block.penalty for block in self.blocks if hasattr(block, "penalty")]


class KeepingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.mix = nn.Linear(12, 3), nn.Linear(12, 12)

    def forward(self, hidden):
        gate = self.gate(hidden).softmax(-1)
        self.penalty = gate.square().mean()
        return self.mix(hidden) * gate.sum(-1, keepdim=True)


class Supervised(nn.Module):
    """Deep supervision: each block's hidden state predicts the labels by the one head."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **batch):
        output = self.inner(**batch, output_hidden_states=True)
        for hidden in output.hidden_states[:-1]:
            logits = self.inner.lm_head(hidden)
            output.loss = output.loss + 0.1 * F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return output


def mixtral():
    """Its loss is over all routers."""
    config = transformers.MixtralConfig(num_local_experts=4, **families._GROUPED | _MOE)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe():
    config = {**families._GROUPED, **_MOE, "num_experts": 4, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))


# By name: the family whose batches and, for some, whose model it takes, and the edit.
MODELS = {
    "mixtral": ("mixtral", _made(mixtral)),
    "qwen3-moe": ("llama", _made(qwen3_moe)),
    "supervised": ("llama", Supervised),
    "unet": ("plain", _made(Unet)),
    "adds-skips": ("plain", _made(AddsSkips)),
    "collects": ("plain", _made(Collects)),
    "by-hooks": ("plain", _made(CollectsByHooks)),
    "inside": ("plain", _made(CollectsInside)),
    "hands-the-first": ("plain", _made(HandsTheFirst)),
    "adds-the-first": ("plain", _made(AddsTheFirst)),
    "looks": ("plain", _made(Looks)),
    "keeps-inside": ("plain", _made(KeepsInside)),
}
