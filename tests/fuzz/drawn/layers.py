# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The drawn model as the layers of a PipelineModule, under the plain model's names."""

from torch import nn
from torch.nn import functional as F

from deeptide.pipeline import LayerSpec, PipelineModule
from drawn.model import Block, Model


class First(nn.Module):
    """The embedding; hands on a dictionary."""

    def __init__(self, spec):
        super().__init__()
        whole = Model({**spec, "blocks": 0})
        self.embed_tokens, self.traits = whole.embed_tokens, spec["traits"]

    def forward(self, given):
        hidden = self.embed_tokens(given["tokens"])
        mask = Model._mask(self, given["tokens"], hidden, given.get("mask"))
        used = given.get("number") if self.traits.get("number") == "used" else None
        return {"hidden": hidden, "mask": mask, "count": 0 if "count" in self.traits else used}


class Last(nn.Module):
    """The last norm and the head."""

    def __init__(self, spec):
        super().__init__()
        whole = Model({**spec, "blocks": 0})
        self.norm, self.lm_head = whole.norm, whole.lm_head

    def forward(self, given):
        return self.lm_head(self.norm(given["hidden"]))


def _loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers_of(spec, stages, world):
    """A PipelineModule whose values the caller sets."""
    blocks = [LayerSpec(Block, number, spec["width"], spec["traits"]) for number in range(spec["blocks"])]
    layers = [LayerSpec(First, spec), *blocks, LayerSpec(Last, spec)]
    return PipelineModule(layers, num_stages=stages, loss_fn=_loss, world=world)


def plain_name(name, blocks):
    """The plain model's name of a layer's parameter or buffer."""
    number, _, rest = name.partition(".")
    return f"layers.{int(number) - 1}.{rest}" if 0 < int(number) <= blocks else rest


def as_layers_take(given):
    """(inputs, labels) of a micro-batch."""
    return {name: value for name, value in given.items() if name != "labels"}, given["labels"]
