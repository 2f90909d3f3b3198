# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights neighbouring ranks share. Each is the layer of torch that it is derived from, on all ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deeptide._C import ConfigError
from deeptide.tensor.cutting.slices import Slice, as_adding, become, cut_parameter
from deeptide.tensor.entry import entered, product_of
from deeptide.tensor.functions import cut, joined, summed
from deeptide.tensor.losses import note_part
from deeptide.tensor.sequence import cut_sequence
from deeptide.tensor.team import Team


def _columns(layer: Any, x: torch.Tensor, is_linear: bool) -> torch.Tensor:
    dim = 1 if layer.tensor_sequence else None
    output = product_of(x, layer.tensor_team, layer.weight, layer.bias, is_linear, dim)
    if not layer.tensor_gathers:
        return output
    whole = joined(output, layer.tensor_output, layer.tensor_team)
    if layer.__dict__.get("tensor_is_head"):
        note_part(whole, output)
    return whole


def _out_of_shared(layer: Any, x: torch.Tensor) -> torch.Tensor:
    positions = layer.__dict__.get("tensor_positions")
    if positions is not None:  # of a model that was cut as it is
        return positions.reduced(x)  # type: ignore[no-any-return]
    return cut_sequence(x, layer.tensor_team, adds_up=True) if layer.tensor_sequence else summed(x, layer.tensor_team)


class ColumnParallelLinear(nn.Linear):
    """A linear layer of whose outputs each rank computes a part. Shapes: (..., in) -> (..., out / ranks).

    gather_output: every rank returns all of them, (..., out). blocks: sizes of what is fused in the outputs and cut by
    itself, such as queries, keys and values; default: all in one. Odd sizes are padded with zeros, which stay zero.
    sequence_parallel: the input is this rank's positions, (batch, length / ranks, in); all are gathered here.
    """

    tensor_team: Team
    tensor_output: Slice
    tensor_gathers: bool
    tensor_sequence: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        team: Team,
        gather_output: bool = False,
        blocks: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        as_column(self, team, gather_output, blocks, sequence_parallel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's features of the output, or all of them."""
        return _columns(self, input, is_linear=True)


class RowParallelLinear(nn.Linear):
    """A linear layer of whose inputs each rank has a part: (..., in / ranks) -> (..., out), summed over the ranks.

    split_input: every rank is given all inputs, (..., in). The bias is whole on each rank. sequence_parallel: each rank
    returns its positions, (batch, length / ranks, out).
    """

    tensor_team: Team
    tensor_input: Slice
    tensor_cuts: bool
    tensor_sequence: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        team: Team,
        split_input: bool = False,
        blocks: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        as_row(self, team, split_input, blocks, sequence_parallel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """All features of the output."""
        x = cut(input, self.tensor_input, self.tensor_team) if self.tensor_cuts else input
        output = _out_of_shared(self, F.linear(x, self.weight))
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of whose words each rank has a part. Shapes: (...) of numbers -> (..., embedding_dim), summed."""

    tensor_team: Team

    def __init__(self, num_embeddings: int, embedding_dim: int, *, team: Team, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        as_vocabulary(self, team)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The words' vectors."""
        part = self.weight.shape[0]
        local = input - self.tensor_team.index * part
        elsewhere = (local < 0) | (local >= part)
        padding = None if self.padding_idx is None else self.padding_idx - self.tensor_team.index * part
        vectors = F.embedding(
            local.masked_fill(elsewhere, 0),
            self.weight,
            padding if padding is not None and 0 <= padding < part else None,
        )
        return summed(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tensor_team)


class ColumnParallelConv1D(nn.Module):
    """Transformers' Conv1D, whose weight is transposed, as a ColumnParallelLinear."""

    weight: nn.Parameter
    bias: nn.Parameter
    tensor_team: Team
    tensor_output: Slice
    tensor_gathers: bool
    tensor_sequence: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features of the output, or all of them."""
        return _columns(self, x, is_linear=False)


class RowParallelConv1D(nn.Module):
    """Transformers' Conv1D, whose weight is transposed, as a RowParallelLinear."""

    weight: nn.Parameter
    bias: nn.Parameter
    tensor_team: Team
    tensor_input: Slice
    tensor_cuts: bool
    tensor_sequence: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All features of the output."""
        x = cut(x, self.tensor_input, self.tensor_team) if self.tensor_cuts else x
        return _out_of_shared(self, F.linear(x, self.weight.t())) + self.bias


class LatentProjection(nn.Module):
    """The first product of multi-head latent attention (arXiv:2405.04434), whole on each rank: mixed into its class.

    Its last features, the rotary part of the keys, go to each rank's heads by no further layer.
    """

    tensor_team: Team
    tensor_parts: tuple[int, int]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., in) -> (..., latent + rotary)."""
        latent, rotary = super().forward(input).split(self.tensor_parts, -1)
        return torch.cat([latent, entered(rotary, self.tensor_team)], -1)


class OwnHeads(nn.ModuleList):
    """Modules, one for each head, of which forward meets those of this rank's heads. The others stay in the model."""

    tensor_team: Team

    def __iter__(self) -> Iterator[nn.Module]:
        heads = list(super().__iter__())
        part = len(heads) // self.tensor_team.size
        yield from heads[self.tensor_team.index * part : (self.tensor_team.index + 1) * part]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Transformers' Conv1D: (in, out) weights."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def is_linear(module: nn.Module) -> bool:
    """Whether it can be cut: a linear layer of torch, with its own forward, or a Conv1D."""
    return is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def features_of(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer or Conv1D, as it was built: a weight that it shares may be cut already."""
    sizes: Any = (module.nx, module.nf) if is_conv1d(module) else (module.in_features, module.out_features)
    return sizes  # type: ignore[no-any-return]


def _blocks(blocks: Sequence[int] | None, features: int) -> tuple[int, ...]:
    chosen = tuple(blocks) if blocks else (features,)
    if sum(chosen) != features or min(chosen) < 1:
        raise ConfigError(f"blocks {chosen} of a layer of {features} features: expected sizes that add up to them")
    return chosen


def slices_of_layer(module: nn.Module, kind: str, blocks: Sequence[int] | None = None) -> dict[str, Slice]:
    """The slices of a layer's parameters by name; kind: "column", "row" or "vocabulary", others have none."""
    if isinstance(module, nn.Embedding):
        return {"weight": Slice(0, (module.num_embeddings,))} if kind == "vocabulary" else {}
    transposed = is_conv1d(module)
    if kind == "column":
        sizes = _blocks(blocks, features_of(module)[1])
        return {"weight": Slice(1 if transposed else 0, sizes), "bias": Slice(0, sizes)}
    if kind == "row":
        return {"weight": Slice(0 if transposed else 1, _blocks(blocks, features_of(module)[0]))}
    return {}


def _cut(module: nn.Module, slices: dict[str, Slice], team: Team) -> None:
    for name, slice_ in slices.items():
        cut_parameter(module, name, slice_, team)


def as_column(
    module: nn.Module,
    team: Team,
    gathers: bool = False,
    blocks: Sequence[int] | None = None,
    sequence: bool = False,
) -> None:
    """Makes a linear layer or Conv1D, whole and equal on all ranks, a column-parallel one."""
    slices = slices_of_layer(module, "column", blocks)
    module.tensor_team, module.tensor_gathers = team, gathers  # type: ignore[assignment]
    module.tensor_output = Slice(-1, slices["weight"].blocks)  # type: ignore[assignment]
    module.tensor_sequence = sequence  # type: ignore[assignment]
    _cut(module, slices, team)
    become(module, ColumnParallelConv1D if is_conv1d(module) else ColumnParallelLinear)


def as_row(
    module: nn.Module,
    team: Team,
    cuts: bool = False,
    blocks: Sequence[int] | None = None,
    sequence: bool = False,
) -> None:
    """Makes a linear layer or Conv1D, whole and equal on all ranks, a row-parallel one."""
    slices = slices_of_layer(module, "row", blocks)
    module.tensor_team, module.tensor_cuts = team, cuts  # type: ignore[assignment]
    module.tensor_input = Slice(-1, slices["weight"].blocks)  # type: ignore[assignment]
    module.tensor_sequence = sequence  # type: ignore[assignment]
    if sequence:
        as_adding(module, team)  # the bias, which is added to a part of the positions
    _cut(module, slices, team)
    become(module, RowParallelConv1D if is_conv1d(module) else RowParallelLinear)


def as_latent(module: nn.Module, team: Team, parts: tuple[int, ...] | None) -> None:
    """Makes a linear layer the projection of latents: its outputs are these two parts."""
    module.tensor_team, module.tensor_parts = team, parts  # type: ignore[assignment]
    become(module, LatentProjection)


def heads_table(path: str, module: nn.Module) -> str | None:
    """The parameter (positions, heads) that a module adds to scores, as T5 and Swin do; or GptOss's sinks, (heads,)."""
    if isinstance(module, nn.Embedding) and path.rpartition(".")[2] == "relative_attention_bias":
        return "weight"
    table, sinks = (module._parameters.get(name) for name in ("relative_position_bias_table", "sinks"))
    if sinks is not None and sinks.dim() == 1:
        return "sinks"
    return "relative_position_bias_table" if table is not None and table.dim() == 2 else None


def slices_of_heads(path: str, module: nn.Module) -> dict[str, Slice]:
    """The slice of such a table by its name; empty for other modules."""
    name = heads_table(path, module)
    if name is None:
        return {}
    shape = module.get_parameter(name).shape
    return {name: Slice(len(shape) - 1, (shape[-1],))}


def as_heads(path: str, module: nn.Module, team: Team) -> None:
    """Leaves this rank's heads in a table, whole and equal on all ranks, of a number for each."""
    module.tensor_team = team  # type: ignore[assignment]
    _cut(module, slices_of_heads(path, module), team)


def as_own_heads(attention: nn.Module, heads: Container[int], team: Team) -> None:
    """Lets lists of a module for each head, as StableLM's norms, give forward those of this rank's heads."""
    for module in attention.modules():
        if type(module) is nn.ModuleList and len(module) in heads and len(module) % team.size == 0:
            module.tensor_team = team  # type: ignore[assignment]
            become(module, OwnHeads)


def as_vocabulary(module: nn.Embedding, team: Team) -> None:
    """Makes an embedding, whole and equal on all ranks, a vocabulary-parallel one. Errors: ConfigError for options."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ConfigError(f"an embedding with {option} cannot be cut among ranks; leave {option} out")
    module.tensor_team = team  # type: ignore[assignment]
    _cut(module, slices_of_layer(module, "vocabulary"), team)
    become(module, VocabParallelEmbedding)
