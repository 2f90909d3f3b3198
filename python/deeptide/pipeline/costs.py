# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Costs of layers on a micro-batch: measured seconds, and bytes that are known from shapes."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._process import generators
from deeptide.pipeline.layers import LayerSpec, TiedLayerSpec
from deeptide.pipeline.place import of_first_rank

_RUNS = 3  # of each layer, the fastest of which counts
_BYTES_TRAINED = 4 + 4 + 4 + 4  # of an element: its sum of gradients, master and two moments


def _steps(layers: Sequence[Any]) -> Iterator[tuple[int, Any, Callable[[Any], Any]]]:
    """(number, layer, what it does) one after the other; a layer that was built is a copy, so nothing changes it."""
    tied: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            own = tied.get(layer.key)
            own = tied[layer.key] = layer.build() if own is None else own
            yield number, own, functools.partial(layer.forward_fn, own) if layer.forward_fn else own
        else:
            own = layer.build() if isinstance(layer, LayerSpec) else layer
            own = copy.deepcopy(own) if own is layer and isinstance(layer, torch.nn.Module) else own
            yield number, own, own


def _parameters(layer: Any) -> list[torch.nn.Parameter]:
    return list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _as_input(tree: Any) -> Any:
    """The same tensors as another stage gets them: without a graph, floating ones with a gradient."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), tree)


def _run(method: str, number: int, layer: Any, step: Callable[[Any], Any], value: Any) -> Any:
    try:
        return step(value)
    except Exception as error:
        name = type(layer).__name__ if isinstance(layer, torch.nn.Module) else getattr(layer, "__name__", "a function")
        raise ConfigError(
            f"partition_method '{method}': layer {number} ({name}) fails on profile_input: "
            f"{type(error).__name__}: {error}; take another method, or inputs as those of a micro-batch"
        ) from error


def seconds_of_layers(layers: Sequence[Any], sample: Any) -> list[float]:
    """Each layer's forward and backward on what the one before returns; the fastest of some runs."""
    found = []
    value = sample
    with generators.kept(), torch.enable_grad():
        for number, layer, step in _steps(layers):
            seconds = []
            trained = [p for p in _parameters(layer) if p.requires_grad]
            for _ in range(_RUNS):
                inputs = _as_input(value)
                begin = time.perf_counter()
                output = _run("profile", number, layer, step, inputs)
                ends = [leaf for leaf in _leaves(output) if leaf.requires_grad]
                wanted = [*trained, *(leaf for leaf in _leaves(inputs) if leaf.requires_grad)]
                if ends and wanted:
                    torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
                seconds.append(time.perf_counter() - begin)
            found.append(min(seconds))
            value = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    return found


def bounds_by_time(layers: Sequence[Any], sample: Any, num_parts: int, world: _C.World | None) -> list[int]:
    """The slowest part is fastest, as rank 0 measures layers. Collective. Errors: ConfigError, on all ranks."""

    def measured() -> str:
        try:
            return json.dumps(seconds_of_layers(layers, sample))
        except ConfigError as error:
            return json.dumps(str(error))

    told = json.loads(of_first_rank(world, measured))
    if isinstance(told, str):
        raise ConfigError(told)
    return _C.bounds_by_time(told, num_parts)


def bytes_of_layers(layers: Sequence[Any], sample: Any) -> tuple[list[int], list[int]]:
    """(bytes of parameters and their training, bytes that backward keeps of a micro-batch) of each layer.

    A tied layer's parameters count where they are first used; what several layers keep, with the first.
    """
    states: list[int] = []
    kept: list[int] = []
    seen: set[Any] = set()
    held: list[torch.Tensor] = []  # so that no other tensor gets the identity of one that was counted

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()._cdata
        if memory not in seen:
            seen.add(memory)
            held.append(tensor)
            kept[-1] += tensor.untyped_storage().nbytes()
        return tensor

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with generators.kept(), torch.enable_grad(), mode:
        value = tree_map_only(torch.Tensor, mode.from_tensor, sample)
        for number, layer, step in _steps(layers):
            own = [p for p in _parameters(layer) if p.untyped_storage()._cdata not in seen]
            seen.update(p.untyped_storage()._cdata for p in own)
            held += own
            states.append(sum(p.numel() * (p.element_size() + _BYTES_TRAINED * p.requires_grad) for p in own))
            kept.append(0)
            with hooks:
                value = _run("memory", number, layer, step, _as_input(value))
    return states, kept


def bounds_by_memory(layers: Sequence[Any], sample: Any, num_stages: int, num_chunks: int) -> list[int]:
    """The largest part is smallest, with the activations of as many micro-batches as its stage has alive."""
    states, kept = bytes_of_layers(layers, sample)
    return _C.bounds_by_memory(states, kept, num_stages, num_chunks)
