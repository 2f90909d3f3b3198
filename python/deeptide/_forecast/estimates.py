# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's rules of thumb for model states, with its results. `deeptide.plan` tells what this engine takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_GIB = 2**30


def _total_of(model: torch.nn.Module) -> int:
    """Elements; memory that several parameters share counts once."""
    places = {(p.untyped_storage()._cdata, p.storage_offset()): p.numel() for p in model.parameters()}
    return sum(places.values())


def _largest_layer_of(model: torch.nn.Module) -> int:
    """Most elements that one module holds by itself."""
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def _say(nodes: int, gpus: int, model: str, rows: Iterable[tuple[int, int, str]]) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes} node{'s'[: nodes > 1]}, {gpus} GPU{'s'[: gpus > 1]} per node.")
    print(f"SW: Model with {model}.")
    print("  per CPU  |  per GPU |   Options")
    for cpu, gpu, options in rows:
        print(f" {cpu / _GIB:7.2f}GB | {gpu / _GIB:6.2f}GB | {options}")


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _device(offloads: bool) -> str:
    return "cpu " if offloads else "none"


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a node's memory, bytes of a GPU's) that ZeRO-2 with Adam in 16 bits needs by DeepSpeed's estimate."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        gpu, cpu_factor = 2 * total_params, max(4 * ranks, 16)
    else:
        gpu, cpu_factor = 2 * total_params + int(18 * total_params / ranks), 4 * num_gpus_per_node
    return int(total_params * cpu_factor * additional_buffer_factor), int(gpu)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates with and without offloading, for a model of which only the size is known."""
    rows = [
        (
            *estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offloads, additional_buffer_factor
            ),
            f"offload_optimizer={_device(offloads)}",
        )
        for offloads in (True, False)
    ]
    _say(num_nodes, num_gpus_per_node, f"{_millions(total_params)} total params", rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same for a model that is there; it may have been built under zero.Init."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _total_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of a node's memory, of a GPU's, of the largest layer) for ZeRO-3, as DeepSpeed estimates them."""
    ranks = num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params
    copies = 4 * num_gpus_per_node  # each rank of a node builds the model
    cpu: float
    if cpu_offload:
        states, share = 18 if cpu_offload_params else 16, 1 / num_nodes
        gpu = layer + (0 if cpu_offload_params else int(2 * total_params / ranks))
        # Multiplied in DeepSpeed's order: the last digit depends on it.
        cpu = total_params * states * share if zero_init else total_params * max(copies, states * share)
    else:
        gpu = layer + int(18 * total_params / ranks)
        cpu = (largest_layer_params if zero_init else total_params) * copies
    return int(cpu * additional_buffer_factor), int(gpu), layer


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates for each way to offload, for a model of which only the sizes are known."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
            rows.append((cpu, gpu, f"{options}, zero_init={int(zero_init)}"))
    sizes = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    _say(num_nodes, num_gpus_per_node, sizes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same for a model that is there; it may have been built under zero.Init."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _total_of(model), _largest_layer_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )
