# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Layers computed tile by tile: TiledLinear, and functions over long sequences that keep one shard's activations.

The second is torch's checkpointing over shards: backward computes each shard anew. Sharded parameters need nothing of
their own, since any operator may use any parameter at any time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from deeptide._model.recomputation import repeatable
from deeptide.as_deepspeed.helpers.norms import partition_uniform

# -- over the features ----------------------------------------------------------------------------------------------


def split_tensor_along_last_dim(
    tensor: torch.Tensor, partitions: int | list[int], contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """(…, N) as tensors (…, n) with the sizes given; each contiguous if that is asked for."""
    chunks: tuple[torch.Tensor, ...] = tensor.split(partitions, dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


class TiledLinear(torch.nn.Module):
    """A linear layer as out_splits x in_splits small ones: at stage 3 only one of them is gathered at a time.

    Shapes: (…, in_features) -> (…, out_features); with `input_is_already_split` a list of in_splits tensors, and with
    `combine_out_splits=False` a list of out_splits outputs. The last tile of a row has the bias.
    Errors: RuntimeError if there are more splits than features, or none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., torch.nn.Module] = torch.nn.Linear,
        init_linear: torch.nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: got {name}_splits={splits}, expected 1 to {name}_features={features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = torch.nn.ModuleList(
            torch.nn.ModuleList(
                linear_cls(columns, rows, bias=bias and place == in_splits - 1, **kwargs)
                for place, columns in enumerate(_widths(self.in_parts))
            )
            for rows in _widths(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """The layer's output."""
        outputs = [self._row(row, self._tiles_of(input_)) for row in self.linears]
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _tiles_of(self, given: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return given if self.input_is_already_split else [given]
        if not self.input_is_already_split:
            return self._split_global_input(given, _widths(self.in_parts))
        if len(given) != self.in_splits:
            raise ValueError(f"TiledLinear: got {len(given)} inputs, expected in_splits={self.in_splits}")
        return list(given)

    def _row(self, row: Any, inputs: Sequence[Any]) -> Any:
        out = None
        for place, (linear, tile) in enumerate(zip(row, inputs, strict=True)):
            out = self._reduce_local_output(in_id=place, out_id=0, current_out=out, new_out=linear(tile))
        return out

    # Subclasses for layers with other inputs and outputs override these three.
    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: torch.nn.Linear) -> None:
        """Copies a whole layer's weight and bias. Errors: ValueError if one has a bias and the other has none."""
        if (other.bias is not None) != self.use_bias:
            raise ValueError(f"copy_params_from: bias is {self.use_bias} here and {other.bias is not None} there")
        rows: Any = self.linears
        for row, (top, bottom) in zip(rows, itertools.pairwise(self.out_parts)):
            for tile, (left, right) in zip(row, itertools.pairwise(self.in_parts)):
                tile.weight.copy_(other.weight[top:bottom, left:right])
            if self.use_bias:
                row[-1].bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """Tiles linear layers that return (output, bias), as Megatron's do: returns whole ones of both."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out if isinstance(new_out, tuple) else (new_out, None)
        if current_out is None:
            return output, bias
        return current_out[0] + output, current_out[1] if bias is None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        values, biases = zip(*outputs)
        return torch.cat(values, dim=-1), None if biases[0] is None else torch.cat(biases, dim=-1)


def _widths(bounds: list[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]


# -- over the sequence ----------------------------------------------------------------------------------------------


def _again(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """function(…), whose activations backward computes again."""
    out: torch.Tensor = torch.utils.checkpoint.checkpoint(repeatable(function), *args, use_reentrant=False, **kwargs)
    return out


def _reduced(whole: torch.Tensor, reduction: str, name: str) -> torch.Tensor:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{name}: output_reduction is {reduction!r}, expected "mean" or "sum"')
    return whole.mean() if reduction == "mean" else whole.sum()


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, torch.Tensor],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Calls fn over shards of the sequence, dimension 1 of tensors (B, S, …); returns them joined, or reduced.

    `compute_params` and `grad_requiring_tensor_key` need not be known here: autograd follows every tensor.
    """
    step = -(-seqlen // shards)
    outputs = [
        _again(fn, **{name: value[:, at : at + step] for name, value in kwargs_to_shard.items()}, **kwargs_to_pass)
        for at in range(0, seqlen, step)
    ]
    whole = torch.stack(outputs) if output_unshard_dimension == 0 else torch.cat(outputs, output_unshard_dimension)
    return whole if output_reduction is None else _reduced(whole, output_reduction, "sequence_tiled_compute")


class SequenceTiledCompute:
    """For code that calls SequenceTiledCompute.apply itself."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: list[str],
        keys_to_pass: list[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """sequence_tiled_compute, with the dictionaries as keys and values."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:count])),
            dict(zip(keys_to_pass, args[count:])),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """An MLP over shards of the sequence: fn(self, x) where x is (B, S, hidden)."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: torch.nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The output, (B, S, hidden)."""
        return torch.cat([_again(fn, self, shard) for shard in x.chunk(shards, dim=1)], dim=1)


class TiledFusedLogitsLoss:
    """A loss over shards of all tokens: the logits of one shard at a time are in memory."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: torch.nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """The mean or the sum of fn(self, x, y[, mask]) over shards of (B * S, …). Shapes: x (B, S, …), y (B, S, …).

        Errors: ValueError if the shapes disagree, or for another reduction.
        """
        given = [x, y] if mask is None else [x, y, mask]
        for name, tensor in zip(("x", "y", "mask"), given):
            if tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] or (name == "mask" and tensor.dim() != 2):
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected the (batch, sequence, …) of x")
        rows = [tensor.flatten(0, 1).chunk(shards) for tensor in given]
        losses = torch.stack([_again(fn, self, *tile) for tile in zip(*rows)])
        return _reduced(losses, output_reduction, "TiledFusedLogitsLoss")
