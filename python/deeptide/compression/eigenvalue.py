# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The largest eigenvalue of each block's Hessian, by power iteration: blocks with small ones bear fewer bits sooner.

Source: Dong et al., HAWQ, arXiv:1905.03696.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deeptide._C import ConfigError, largest_eigenvalue
from deeptide._process.log import say


@dataclasses.dataclass
class Eigenvalue:
    """The section "eigenvalue": blocks are the first `layer_num` modules of the list at `layer_name`."""

    verbose: bool = False
    max_iter: int = 100
    tol: float = 1e-2
    stability: float = 0.0
    gas_boundary_resolution: int = 1
    layer_name: str = ""
    layer_num: int = 0

    def __post_init__(self) -> None:
        if not self.layer_name or self.layer_num < 1:
            raise ConfigError(
                f"eigenvalue: got layer_name {self.layer_name!r} and layer_num {self.layer_num}; give the name of the "
                "list of layers and how many it has"
            )

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The blocks of a model. Errors: ConfigError where it has fewer."""
        try:
            layers = module.get_submodule(self.layer_name)
        except AttributeError:
            layers = None
        if not isinstance(layers, (nn.ModuleList, nn.Sequential)) or len(layers) < self.layer_num:
            raise ConfigError(
                f"eigenvalue.layer_name: the model has no list of {self.layer_num} layers at {self.layer_name!r}"
            )
        return list(layers)[: self.layer_num]

    def compute_eigenvalue(
        self, module: nn.Module, device: torch.device | str | None = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """{id of a parameter: (its block's eigenvalue from 0 to 1, the block)}, from .grad made with create_graph=True.

        Returns {} where a block's gradients have no graph. `scale`: the loss scale of the gradients.
        """
        blocks = self.blocks(module)
        pairs = []
        for block in blocks:
            found = [(p, p.grad) for p in block.parameters() if p.grad is not None and p.grad.grad_fn is not None]
            if not found:
                return {}
            pairs.append(found)
        values = self.normalised([self._largest(found, number, scale) for number, found in enumerate(pairs)])
        keys = [(id(p), number) for number, block in enumerate(blocks) for p in block.parameters()]
        return {key: (values[number], number) for key, number in keys}

    def of_loss(self, loss: Tensor, module: nn.Module) -> list[float]:
        """The largest eigenvalue of each block, of a loss before its backward, which can still run."""
        values = []
        for number, block in enumerate(self.blocks(module)):
            parameters = [p for p in block.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            found = [
                (p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None and g.grad_fn is not None
            ]
            values.append(self._largest(found, number, 1.0) if found else 0.0)
        return values

    def _largest(self, pairs: list[tuple[nn.Parameter, Tensor]], number: int, scale: float) -> float:
        parameters, gradients = [p for p, _ in pairs], [g for _, g in pairs]
        value, steps = largest_eigenvalue(parameters, gradients, self.max_iter, self.tol, self.stability, scale)
        if self.verbose:
            say(f"block {number}: eigenvalue {value:.6g} after {steps} iterations")
        return value

    @staticmethod
    def normalised(values: list[float]) -> list[float]:
        """Magnitudes over the largest one; 1 for a block that has none."""
        largest = max(abs(value) for value in values)
        return [abs(value) / largest if value != 0 else 1.0 for value in values]
