# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A small residual network with BatchNorm, and pictures of ten kinds that are drawn here: nothing is downloaded."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SIZE, KINDS = 32, 10


class Block(nn.Module):
    """Two convolutions and a shortcut; halves the picture where it doubles the channels."""

    def __init__(self, channels_in, channels):
        super().__init__()
        stride = channels // channels_in
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def make_model(width=16):
    torch.manual_seed(0)
    blocks = [Block(width, width), Block(width, 2 * width), Block(2 * width, 4 * width)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, KINDS),
    )


def _shape(kind, x, y):
    """The points that a shape of one size covers; x and y are -1 to 1 across the plane."""
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    radius = (x.square() + y.square()).sqrt()
    inside = far < 1
    covers = [
        radius < 1,
        (radius < 1) & (radius > 0.6),
        inside,
        inside & (far > 0.6),
        inside & (near < 0.25),
        inside & ((x - y).abs() < 0.35) | inside & ((x + y).abs() < 0.35),
        inside & ((x * 3).floor().long() % 2 == 0),
        inside & ((y * 3).floor().long() % 2 == 0),
        inside & (y > 2 * x.abs() - 1),
        x.abs() + y.abs() < 1,
    ]
    return covers[kind]


def make_pictures(count, seed):
    """`count` pictures (3, 32, 32) with their kinds: a shape of any place, size and colour, in noise."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count,), generator=generator)
    size = 5 + 5 * torch.rand(count, generator=generator)
    centre = 10 + 12 * torch.rand(count, 2, generator=generator)
    colours = torch.rand(count, 2, 3, 1, 1, generator=generator)
    pictures = 0.15 * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for i, kind in enumerate(kinds.tolist()):
        cover = _shape(kind, (xs - centre[i, 0]) / size[i], (ys - centre[i, 1]) / size[i])
        pictures[i] += torch.where(cover, 0.5 + colours[i, 0] / 2, colours[i, 1] / 3)
    return TensorDataset(pictures, kinds)
