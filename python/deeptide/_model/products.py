# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Products of an activation with a weight and their two gradients, each by itself: bit for bit what torch computes.

Shapes: I inputs, O outputs; rows are (N, I) or (N, O).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (leaf, its gradient)


class Factors(NamedTuple):
    """A weight's gradient as left @ right, (N, K) and (K, M), or that transposed: as torch would compute it."""

    left: torch.Tensor
    right: torch.Tensor
    is_transposed: bool

    def product(self) -> torch.Tensor:
        """(N, M), or (M, N)."""
        product = torch.mm(self.left, self.right)
        return product.t() if self.is_transposed else product


class Layout(NamedTuple):
    """How an activation lies in memory, on which the operators depend that torch would call."""

    shape: torch.Size
    is_transposed: bool  # its rows

    @classmethod
    def of(cls, inputs: torch.Tensor) -> Layout:
        """That of `inputs`, (…, I)."""
        return cls(inputs.shape, _is_transposed(_rows(inputs)))


class Weight(NamedTuple):
    """The other factor of a product with an activation: (O, I) where the product is F.linear, else (I, O)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_linear: bool

    def as_factor(self, dtype: torch.dtype | None) -> torch.Tensor:
        """The second factor, (I, O), without a graph; in `dtype`, if it is given."""
        weight = self.weight.detach() if dtype is None else self.weight.detach().to(dtype)
        return weight.t() if self.is_linear else weight

    def product(self, inputs: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """(…, I) -> (…, O), by the operators that torch would call: bit for bit what it computes."""
        factor = self.as_factor(dtype)
        bias = None if self.bias is None else self.bias.detach().to(factor.dtype)
        rows = _rows(inputs)
        if bias is not None and _is_flattened(inputs):
            products = torch.addmm(bias, rows, factor)
        else:
            products = torch.mm(rows, factor)
        if inputs.dim() == 2:
            return products
        # No view: the program may write it.
        outputs: torch.Tensor = torch.ops.aten._unsafe_view(products, [*inputs.shape[:-1], products.shape[-1]])
        return outputs if bias is None or _is_flattened(inputs) else outputs.add_(bias)

    def input_gradient(self, inputs: Layout, gradient: torch.Tensor) -> torch.Tensor:
        """(…, O) -> (…, I)."""
        factor, row_gradients = self.as_factor(gradient.dtype), _rows(gradient)
        if inputs.is_transposed:
            return torch.mm(factor, row_gradients.t()).t().reshape(inputs.shape)
        return torch.mm(row_gradients, factor.t()).reshape(inputs.shape)

    def factors(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Factors:
        """Those whose product is the weight's gradient."""
        rows, row_gradients = _rows(inputs), _rows(gradient)
        if _is_transposed(self.weight.t() if self.is_linear else self.weight):
            return Factors(row_gradients.t(), rows, not self.is_linear)
        return Factors(rows.t(), row_gradients, self.is_linear)

    def bias_gradient(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Pairs:
        """The bias with its gradient, if it is trained."""
        if self.bias is None or not self.bias.requires_grad:
            return []
        summed = _rows(gradient) if _is_flattened(inputs) else gradient
        return [(self.bias, summed.sum_to_size(self.bias.shape).to(self.bias.dtype))]

    def own_gradients(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Pairs:
        """Those of the weight and of the bias."""
        found = self.factors(inputs, gradient).product().to(self.weight.dtype)
        return [(self.weight, found), *self.bias_gradient(inputs, gradient)]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _is_flattened(inputs: torch.Tensor) -> bool:
    """Whether torch adds the bias within the product."""
    return inputs.dim() == 2 or inputs.is_contiguous()


def _is_transposed(factor: torch.Tensor) -> bool:
    """Whether torch computes a factor's gradient transposed, since the factor lies so."""
    return factor.stride(0) == 1 and factor.stride(1) == factor.shape[0]
