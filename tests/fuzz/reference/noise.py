# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""How far rounding may move values: what the oracle adds to them, and how much of it."""

import torch

EPSILON = {
    torch.float32: 2.0**-22,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}  # of gradients that are summed and rounded again
# A share of the largest element that a rank sends. Noise is normal and counts often, this is a bound: half of it, since
# a model of few elements may meet its noise where it moves nothing.
OF_QUANTIZED = {"int8": 0.5 / 127 / 2, "int4": 0.5 / 7 / 2}
OF_MOMENTS = 2.0**-8  # of those in bf16, in each step and load
# With 16 bits enough for some elements to round elsewhere.
OF_MASTERS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-13, torch.float16: 2.0**-16}


class Noise:
    """Normal numbers, `scale` large, that follow from a seed."""

    def __init__(self, seed, scale):
        self.generator, self.scale = torch.Generator().manual_seed(seed), scale

    def like(self, tensor):
        return self.scale * torch.randn(tensor.shape, generator=self.generator)


def cloned(state):
    """The same names with copies of the values."""
    return {name: value.detach().clone() for name, value in state.items()}
