# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model as a list of layers, of which this process builds those of its stage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from deeptide import _C
from deeptide._C import ConfigError
from deeptide._model.recomputation import repeatable
from deeptide.pipeline.cutting.shared_buffers import SharedBuffers
from deeptide.pipeline.cutting.ties import ties_of_layers
from deeptide.pipeline.layers import LayerSpec, TiedLayerSpec
from deeptide.pipeline.partition import bounds_of
from deeptide.pipeline.passing.skips import Skips
from deeptide.pipeline.place import place
from deeptide.pipeline.step.batches import split


def _recompute(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(repeatable(function), *args, use_reentrant=False)


def _seed(number: int) -> None:
    torch.manual_seed(number)


def _chain(steps: list[Callable[[Any], Any]], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


def _chain_of_tuple(steps: list[Callable[[Any], Any]], *values: Any) -> Any:
    return _chain(steps, values)


def _stages_of(topology: Any, num_ranks: int) -> int:
    """Errors: ConfigError unless its axes are pipe, then data, then model, and it has all ranks."""
    sizes = dict(zip(topology.axes, topology.dims, strict=True))
    larger = [axis for axis, size in sizes.items() if size > 1]
    if larger != [axis for axis in ("pipe", "data", "model") if axis in larger]:
        raise ConfigError(
            f"PipelineModule: topology: got the axes {sizes}, expected pipe, then data, then model; no other axis may "
            "be larger than 1 yet"
        )
    if topology.world_size() != num_ranks:
        raise ConfigError(f"PipelineModule: topology: {sizes} has {topology.world_size()} ranks, the job {num_ranks}")
    return max(int(topology.get_dim("pipe")), 1)


class PipelineModule(torch.nn.Module):
    """A model that ranks train as the stages of a pipeline, each with consecutive layers.

    layers: modules, functions, LayerSpecs and TiedLayerSpecs. Each takes what the one before it returns, as its only
    argument: a tensor, or tensors in tuples, lists and dictionaries. Exactly one of num_stages and topology (axes pipe,
    data, model) is given; consecutive ranks share a stage, and each stage trains with ZeRO over them. loss_fn(outputs,
    labels) runs on the last stage; without it, the last layer returns the loss.
    seed_layers: seeds torch, or calls seed_fn, with base_seed + the layer's number before a layer is built: then every
    cut of the model begins with the same weights. partition_method: "parameters", "uniform", "type:REGEX", "profile" or
    "memory". profile_input: what the first layer takes of a micro-batch, for those two. "profile" measures each layer's
    forward and backward on rank 0, whose seconds all ranks take, and makes the slowest stage fastest. "memory" makes
    the largest stage smallest: bytes of parameters, gradients, Adam's states in fp32, and what backward keeps of as
    many micro-batches as the schedule has alive there; layers run on shapes, without memory.
    activation_checkpoint_interval: so many layers are recomputed together in backward; 0: none. `dynamic_shape` has no
    effect: activations may always change. chunks: so many runs of layers on each stage, chunk 0 of all stages before
    chunk 1: the schedule is then the interleaved one, whose bubble is `chunks` times smaller, for as many more letters.
    world: ranks as threads of one process.
    Parameters have the names of the uncut model: "3.weight" is of layer 3, "tied_modules.KEY.weight" of a tied one.
    """

    skips: Skips | None = None  # values go from layer to layer alone

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int = 1,
        profile_input: Any = None,
        world: _C.World | None = None,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("PipelineModule: got neither num_stages nor topology, expected one of them")
        rank, num_ranks = place(world)
        stages = int(num_stages) if topology is None else _stages_of(topology, num_ranks)  # type: ignore[arg-type]
        if num_stages is not None and num_stages != stages:
            raise ConfigError(f"PipelineModule: num_stages is {num_stages}, and the topology has {stages} stages")
        self.num_stages = stages
        self.stage_id = _C.stage_of_rank(rank, stages, num_ranks)
        self.num_chunks = self._checked(chunks)
        self.loss_fn = loss_fn
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._recompute = activation_checkpoint_func or _recompute
        self._recomputed_types = checkpointable_layers
        self._specs = list(layers)
        self._given_topology = topology
        self.parts = bounds_of(
            self._specs,
            stages * self.num_chunks,
            partition_method,
            None if profile_input is None else self._measured(partition_method, profile_input, world),
        )
        self._build(seed_layers, seed_fn or _seed, base_seed)
        self._check_sharing()
        self.ties = ties_of_layers(self)
        self._shared_buffers = SharedBuffers(self._tied_modules())

    def _measured(self, method: str, sample: Any, world: _C.World | None) -> Callable[[], list[int]]:
        from deeptide.pipeline import costs

        if method.lower() == "profile":
            return lambda: costs.bounds_by_time(self._specs, sample, self.num_stages * self.num_chunks, world)
        return lambda: costs.bounds_by_memory(self._specs, sample, self.num_stages, self.num_chunks)

    def _checked(self, chunks: int) -> int:
        """One stage has all layers, in order. Errors: ValueError."""
        if chunks < 1:
            raise ValueError(f"PipelineModule: chunks: got {chunks}, expected 1 or more runs of layers on each stage")
        return chunks if self.num_stages > 1 else 1

    def _layers_of(self, stage: int) -> list[tuple[int, int]]:
        """The bounds of a stage's chunks."""
        return list(itertools.pairwise(self.parts))[stage :: self.num_stages]

    def _build(self, seeds: bool, seed: Callable[[int], None], base_seed: int) -> None:
        self.tied_modules = torch.nn.ModuleDict()
        self._steps: list[Callable[[Any], Any]] = []  # what this stage's layers do, in order
        self._kinds: list[Any] = []  # the layer of each step
        self._bounds = [0]  # of the chunks' steps
        for begin, end in self._layers_of(self.stage_id):
            for index in range(begin, end):
                if seeds:
                    seed(base_seed + index)
                self._add(index, self._specs[index])
            self._bounds.append(len(self._steps))

    def _add(self, index: int, layer: Any) -> None:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            tied = self.tied_modules[layer.key]
            function = layer.forward_fn
            self._steps.append(tied if function is None else lambda inputs: function(tied, inputs))
            self._kinds.append(tied)
            return
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, torch.nn.Module):
            self.add_module(str(index), built)
        elif not callable(built):
            raise TypeError(
                f"PipelineModule: layer {index}: got {type(layer).__name__}, expected a module, a LayerSpec or a "
                "function"
            )
        self._steps.append(built)
        self._kinds.append(built)

    def _tied_modules(self) -> Iterator[tuple[str, torch.nn.Module, list[int]]]:
        """The modules of tied layers that this stage has, with the stages that use them."""
        for key, stages in self.stages_of_ties().items():
            if self.stage_id in stages:
                for path, module in self.tied_modules[key].named_modules(prefix=f"tied_modules.{key}"):
                    yield path, module, stages

    def _check_sharing(self) -> None:
        """Errors: ConfigError if layers of two stages are, or have, one module and no TiedLayerSpec says so."""
        seen: dict[int, int] = {}
        for index, layer in enumerate(self._specs):
            for parameter in layer.parameters() if isinstance(layer, torch.nn.Module) else ():
                first = seen.setdefault(id(parameter), index)
                if self.stage_of_layer(first) != self.stage_of_layer(index):
                    raise ConfigError(
                        f"PipelineModule: layers {first} and {index} share a parameter of shape "
                        f"{tuple(parameter.shape)}, and are in stages {self.stage_of_layer(first)} and "
                        f"{self.stage_of_layer(index)}, each of which would train a copy: give both as "
                        "TiedLayerSpec(key, …) with one key"
                    )

    def stages_of_ties(self) -> dict[str, list[int]]:
        """The stages with each key of a TiedLayerSpec, ascending: the first one owns it."""
        found: dict[str, list[int]] = {}
        for index, layer in enumerate(self._specs):
            if isinstance(layer, TiedLayerSpec):
                stage = self.stage_of_layer(index)
                stages = found.setdefault(layer.key, [])
                if stage not in stages:
                    stages.append(stage)
        return {key: sorted(stages) for key, stages in found.items()}

    def stage_of_layer(self, index: int) -> int:
        """The stage that has a layer, by its number in `layers`."""
        if not 0 <= index < len(self._specs):
            raise IndexError(f"layer {index}: expected 0 to {len(self._specs) - 1}")
        return next(part for part, end in enumerate(self.parts[1:]) if index < end) % self.num_stages

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def topology(self) -> Any:
        """The topology that was given, or that of num_stages: axes pipe and data."""
        if self._given_topology is not None:
            return self._given_topology
        from deeptide.as_deepspeed.pipe.topology import PipeDataParallelTopology

        return PipeDataParallelTopology(self.num_stages, max(place(None)[1] // self.num_stages, 1))

    def shares_layers(self) -> bool:
        """Whether the topology that was given has ranks that share layers."""
        return self._given_topology is not None and int(self._given_topology.get_dim("model")) > 1

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """None: a class of yours may return a dictionary of losses beside that of loss_fn, for your own records."""
        return None

    def _is_recomputed(self, layers: Sequence[Any]) -> bool:
        if self._recomputed_types is not None:
            return all(type(layer).__name__ in self._recomputed_types for layer in layers)
        modules = [layer for layer in layers if isinstance(layer, torch.nn.Module)]
        return any(True for module in modules for _ in module.parameters())

    def _runs(self, chunk: int) -> Iterator[tuple[bool, list[Callable[[Any], Any]]]]:
        """Steps that run together, and whether backward computes them again."""
        first, last = self._bounds[chunk : chunk + 2]
        interval = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        if interval == 0:
            yield False, self._steps[first:last]
            return
        for begin in range(first, last, interval):
            end = min(begin + interval, last)
            yield self._is_recomputed(self._kinds[begin:end]), self._steps[begin:end]

    def set_checkpoint_interval(self, interval: int) -> None:
        """So many layers are recomputed together in backward from now on; 0: none. Errors: ValueError if negative."""
        if interval < 0:
            raise ValueError(f"activation_checkpoint_interval: got {interval}, expected 0 or more")
        self.activation_checkpoint_interval = interval

    def reads_batches(self) -> bool:
        """The first stage takes the inputs, the last one the labels."""
        return self.stage_id in (0, self.num_stages - 1)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, labels) of a micro-batch."""
        return split(batch, self.loss_fn is not None)

    def trains(self, chunk: int) -> bool:
        """Whether a chunk of this stage has a trained parameter of its own: those that it borrows are none."""
        layers = self._kinds[slice(*self._bounds[chunk : chunk + 2])]
        modules = (layer for layer in layers if isinstance(layer, torch.nn.Module))
        return any(parameter.requires_grad for module in modules for parameter in module.parameters())

    def check_output(self, output: Any, in_step: bool = False) -> None:
        """Any output may go to the program."""

    def is_void(self) -> bool:
        """Layers need what the one before returns, always."""
        return False

    def open_again(self, kinds: Iterable[Any]) -> None:
        """Nothing is learnt of forwards."""

    def compute(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This stage's layers."""
        return module(*args, **kwargs)

    def begin(self) -> None:
        """Each layer runs once per micro-batch."""

    def kind_of(self, inputs: Any) -> None:
        """All forwards are of one kind."""

    def run_stage(self, forward: Callable[..., Any], inputs: Any, received: Any, chunk: int = 0) -> Any:
        """A forward of a chunk: of the micro-batch's inputs in the model's first one, else of what was received."""
        given = inputs if self.stage_id == 0 and chunk == 0 else received
        with self._shared_buffers.unchanged():
            return forward(given, chunk=chunk) if self.num_chunks > 1 else forward(given)

    def loss_of(self, output: Any, labels: Any) -> torch.Tensor:
        """The loss of the last stage's output. Errors: ValueError if it is no scalar."""
        loss = output if self.loss_fn is None else self.loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            source = "the last layer returns it, or give loss_fn" if self.loss_fn is None else "loss_fn returns it"
            raise ValueError(f"the loss of a micro-batch: got {got}, expected a scalar tensor; {source}")
        return loss

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Runs the layers of one of this stage's chunks on what the part before it returns."""
        for recomputed, steps in self._runs(chunk):
            if not recomputed:
                inputs = _chain(steps, inputs)
            elif isinstance(inputs, tuple):
                inputs = self._recompute(functools.partial(_chain_of_tuple, steps), *inputs)
            else:
                inputs = self._recompute(functools.partial(_chain, steps), inputs)
        return inputs
