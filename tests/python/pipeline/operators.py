# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Models in small without a chain of blocks; each an edit of families.train, which shows the model an example."""

import families
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from deeptide.pipeline import show_example

PIXELS = {"pixel_values": torch.randn(1, 3, 8, 8), "labels": torch.zeros(1, dtype=torch.long)}
TOKENS = (torch.zeros(1, 4, dtype=torch.long),) * 2


class Residual(nn.Module):
    """A block of a ResNet; another shape on the way around where it halves the picture."""

    def __init__(self, given, made, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, made), nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(given, made, 1, stride) if stride > 1 else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = x if self.around is None else self.around(x)
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Layers are attributes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 3)
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.layer1 = nn.Sequential(Residual(6, 6, 1), Residual(6, 6, 1))
        self.layer2 = nn.Sequential(Residual(6, 12, 2), Residual(12, 12, 1))

    def forward(self, pixel_values, labels):
        x = F.relu_(self.norm(self.conv(pixel_values.to(self.fc.weight.dtype))))
        x = F.adaptive_avg_pool2d(self.layer2(self.layer1(x)), 1)
        return F.cross_entropy(self.fc(x.flatten(1)), labels)


def double(given, made):
    return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(2, made), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Long skips, from each level going down to the same going up."""

    def __init__(self):
        super().__init__()
        self.up1, self.up2 = double(12 + 8, 8), double(8 + 6, 6)
        self.down1, self.down2, self.middle = double(3, 6), double(6, 8), double(8, 12)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, pixel_values, labels):
        first = self.down1(pixel_values.to(self.head.weight.dtype))
        second = self.down2(F.max_pool2d(first, 2))
        x = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2)
        x = self.up1(torch.cat([x, second], 1))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), first], 1))
        return F.cross_entropy(self.head(x).mean((2, 3)), labels)


class Towers(nn.Module):
    """A tower for each of two views, which the end joins, with a scale of its own. One lends the end a layer."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(families.VOCABULARY, 12), nn.Parameter(torch.ones(()) * 2)
        self.left = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10))
        self.right = nn.Sequential(nn.Linear(12, 18), nn.Tanh(), nn.Linear(18, 10))

    def forward(self, tokens, labels):
        left = self.left(self.words(tokens).mean(1))
        words = self.words(labels).cumsum(1)[:, -1]
        scores = F.normalize(left) @ F.normalize(self.right(words)).T * self.scale.exp()
        scores = scores + self.left[0](words)[:, : len(words)]
        return F.cross_entropy(scores, torch.arange(len(scores)))


class Tied(nn.Module):
    """Written by hand: attributes, and the last layer is the first one's weight, by a function."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(families.VOCABULARY, 12), nn.LayerNorm(12)
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 12)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        x = x + self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(self.norm(x))))))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())


class Twice(nn.Module):
    """Two modules in turn, each called three times, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(families.VOCABULARY, 12), nn.Linear(12, families.VOCABULARY, bias=False)
        self.mix, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for _ in range(3):
            x = x + self.mix(self.norm(x)).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Table(nn.Module):
    """Is called without arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 12) / 5)

    def forward(self):
        return self.weight.tanh()


class Attends(nn.Module):
    """A layer of torch's that computes with a weight past its module, and a recurrent one."""

    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(families.VOCABULARY, 12), nn.GRU(12, 12, batch_first=True)
        self.places = Table()
        self.attention, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, families.VOCABULARY)

    def forward(self, tokens, labels):
        x, _ = self.gru(self.embed(tokens) + self.places()[: tokens.shape[1]])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Clip(nn.Module):
    """One of Transformers' with two chains, which finds its own example."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
        words = {"vocab_size": families.VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2}
        picture = {"image_size": 8, "patch_size": 4}
        self.clip = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=sizes | words, vision_config=sizes | picture, projection_dim=8)
        )

    def forward(self, pixel_values, labels):
        tokens = torch.arange(6) % 5 + labels.unsqueeze(1)
        return self.clip(input_ids=tokens, pixel_values=pixel_values, return_loss=True).loss


# By name: the family whose batches it takes, its class, an example.
MODELS = {
    "resnet": ("vit", ResNet, PIXELS),
    "unet": ("vit", UNet, PIXELS),
    "towers": ("plain", Towers, TOKENS),
    "tied": ("plain", Tied, TOKENS),
    "twice": ("plain", Twice, TOKENS),
    "attends": ("plain", Attends, TOKENS),
    "clip": ("vit", Clip, PIXELS),
}


def edit_of(name):
    _, make, example = MODELS[name]

    def edit(model):
        with families._seeding:
            torch.manual_seed(3)
            made = make()
        show_example(made, example)
        return made

    return edit
