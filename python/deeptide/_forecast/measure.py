# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one micro-batch without memory: what each block keeps for backward, computes, hands on and exchanges."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide.activations.choice import Measured
from deeptide.activations.measure import Meter, watched
from deeptide.tensor.cutting.split import split_model
from deeptide.tensor.team import Team

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # which torch's counter leaves out


@dataclasses.dataclass(frozen=True)
class Part:
    """One block, or what the program does before or after the blocks. Units: bytes of one micro-batch on one rank."""

    kept: Measured  # for backward; the time is not known here
    handed: int  # to the block: what would travel if a stage began here
    flops: int  # of its forward's products, two for each multiplication
    sent_forward: int = 0  # to ranks that share layers
    sent_backward: int = 0
    arguments: int = 0  # without gradients, such as masks: a recomputation keeps those of all of a stage's blocks once
    shared: int = 0  # bytes it needs that a part before it keeps: a stage that begins here keeps them itself
    sent_again: int = 0  # by a recomputation, which ends with the last tensor that backward needs


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A forward and a backward of one micro-batch on one rank of a team that shares layers."""

    before: Part
    blocks: list[Part]
    after: Part
    tokens: int  # elements of its first tensor of integers in rows, or samples

    @property
    def parts(self) -> list[Part]:
        """All, in the order of the program."""
        return [self.before, *self.blocks, self.after]

    @property
    def flops(self) -> int:
        """Those of the forward."""
        return sum(part.flops for part in self.parts)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Stands in for a sum that travels."""

    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The sum."""
        return self.result


class _Exchanges:
    """Stands in for the ranks that share layers: shapes alone, and a count of bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.index, self.data_rank, self.data_size = size, 0, 0, 1
        self.bytes = 0

    def _send(self, tensor: torch.Tensor, times: int) -> None:
        """So many times a rank's part of the tensor to each other rank."""
        self.bytes += times * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size

    def all_reduce(self, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        """Each rank adds up its part, and sends it to the others."""
        self._send(tensor, 2)
        return tensor.detach().clone()

    def all_gather(self, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        """The whole tensor goes to each other rank."""
        self._send(tensor, self.size)
        return torch.stack([tensor.detach()] * self.size)

    def reduce_scatter(self, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        """The tensor has the rows of all ranks."""
        self._send(tensor, 1)
        return tensor.detach()[0].clone()

    def start_all_reduce(self, tensor: torch.Tensor, phase: str) -> _Sum:
        """An all_reduce, whose result is there already."""
        return _Sum(self.all_reduce(tensor, phase))

    def start_reduce_scatter(self, tensor: torch.Tensor, phase: str) -> _Sum:
        """A reduce_scatter, likewise."""
        return _Sum(self.reduce_scatter(tensor, phase))

    def broadcast(self, tensor: torch.Tensor, phase: str) -> None:
        """Values do not matter here."""


def dtype_of(config: Config) -> torch.dtype | None:
    """The type that parameters compute in; None: their own."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if json.loads(_C.config_section(config, section))["enabled"]:
            return dtype
    return None


def _without_memory(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose parameters and buffers are shapes."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = torch.empty(tensor.shape, dtype=kind)
        memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
    return copy.deepcopy(model, memo)


def _fresh(batch: Any, samples: int) -> Any:
    """The batch's shapes with so many samples."""
    return tree_map_only(
        torch.Tensor, lambda t: torch.empty((samples, *t.shape[1:]) if t.dim() else t.shape, dtype=t.dtype), batch
    )


def samples_of(batch: Any) -> int:
    """The rows of its first tensor."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _tokens_of(batch: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    rows = [tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
    return rows[0].numel() if rows else samples_of(batch)


def _loss_of(output: Any) -> torch.Tensor:
    """The loss, or what stands for one: the sum of the first floating tensor."""
    loss = getattr(output, "loss", None)
    found = [loss] if loss is not None else [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    floats = [tensor for tensor in found if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise ConfigError("plan: the model's forward returns no loss that a backward could begin with")
    return floats[0].float().sum()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query, key, value))


class _Run:
    """Takes the figures at the borders of blocks, as the program passes them."""

    def __init__(self, blocks: dict[str, nn.Module], exchanges: _Exchanges | None) -> None:
        """blocks: by a name of each call; a module that is called twice has two."""
        self.meter = Meter(blocks, torch.device("cpu"))
        self._blocks, self._exchanges = blocks, exchanges
        self._is_inside = False  # a block's forward
        self._counter: Any = flop_counter.FlopCounterMode(display=False, custom_mapping={_ATTENTION: _attention_flops})
        self.flops: dict[str, int] = dict.fromkeys(blocks, 0)
        self.sent: dict[str, int] = dict.fromkeys(blocks, 0)
        self._begun: dict[str, int] = {}  # sent when a block's backward began
        self._ended: dict[str, int] = {}
        self.arguments: dict[str, int] = dict.fromkeys(blocks, 0)
        self.shared: dict[str, int] = dict.fromkeys(blocks, 0)
        self.again: dict[str, int] = dict.fromkeys(blocks, 0)
        self.handed: dict[str, int] = dict.fromkeys(blocks, 0)
        self._signatures: dict[str, Any] = {}  # the kind of a block, and shapes of what it is called with
        self._keeps_shape: dict[str, bool] = {}
        self._twins: dict[str, str] = {}  # of blocks that were passed over: the one whose figures they have
        self.before: tuple[int, int, int] | None = None  # what was kept, computed and sent before the first block

    def _sent(self) -> int:
        return self._exchanges.bytes if self._exchanges is not None else 0

    def _now(self) -> tuple[int, int]:
        return self._counter.get_total_flops(), self._sent()

    def _note(self, values: Any, when: dict[str, int], name: str) -> int:
        """Notes what was sent when backward comes to these values. Returns the bytes of the floating ones."""
        floats = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for tensor in [tensor for tensor in floats if tensor.requires_grad][:1]:
            tensor.register_hook(lambda _: self._keep(when, name))
        return sum(tensor.numel() * tensor.element_size() for tensor in floats)

    def _keep(self, when: dict[str, int], name: str) -> None:
        when.setdefault(name, self._sent())

    def _saved(self, tensor: torch.Tensor, name: str, begun: int, before: set[int]) -> None:
        """Backward will need a tensor of a block."""
        self.again[name] = self._sent() - begun
        storage = tensor.untyped_storage()
        if storage._cdata in before:
            before.remove(storage._cdata)
            self.shared[name] += storage.nbytes()

    def _block(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flops, sent = self._now()
        if self.before is None:
            self.before = self.meter.beside, flops, sent
        if self._passes(name, args, kwargs):
            return args[0]
        self.handed[name] = self._note(args[:1] or list(kwargs.values())[:1], self._ended, name)
        plain = [
            each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and not each.requires_grad
        ]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}
        self.arguments[name] = sum(storages.values())
        before = self.meter.storages()
        with self.meter.block(name, (args, kwargs)), watched(lambda tensor: self._saved(tensor, name, sent, before)):
            self._is_inside = True
            output = forward(*args, **kwargs)
            self._is_inside = False
        self._note(output, self._begun, name)
        self._keeps_shape[name] = bool(args) and getattr(output, "shape", 0) == getattr(args[0], "shape", None)
        now, later = self._now()
        self.flops[name] += now - flops
        self.sent[name] += later - sent
        return output

    def _passes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a block does what the two before it did: then it is passed over, as tensors keep their shapes."""
        block, names = self._blocks[name], list(self._blocks)
        shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves((args, kwargs))]
        joins = block.__dict__.get("tensor_ends", False)  # positions, behind the last block
        self._signatures[name] = type(block), joins, [p.shape for p in block.parameters()], shapes
        two = names[max(names.index(name) - 2, 0) : names.index(name)]
        if len(two) < 2 or any(self._signatures.get(each) != self._signatures[name] for each in two):
            return False
        first, second = (self._twins.get(each, each) for each in two)
        if self._figures(first) != self._figures(second) or not self._keeps_shape.get(second):
            return False
        self._twins[name] = second
        return True

    def _figures(self, name: str) -> tuple[Any, ...]:
        return (*self.meter.of_block(name), self.flops[name], self.sent[name], self.handed[name], self.shared[name])

    def forward(self, model: nn.Module, call: Callable[[], Any]) -> Any:
        """One forward of the model, whose blocks' forwards pass through here."""
        calls: dict[nn.Module, list[str]] = {}
        for name, block in self._blocks.items():
            calls.setdefault(block, []).append(name)
        for block, names in calls.items():
            cast("Any", block).forward = self._through(names, block.forward)
        with self._counter, self.meter.forward(model):
            output = call()
            self.all = self._now()
        self.meter.end_forward()
        return output

    def _through(self, names: Sequence[str], forward: Callable[..., Any]) -> Callable[..., Any]:
        left = iter(names)

        def through(*args: Any, **kwargs: Any) -> Any:
            name = None if self._is_inside else next(left, None)  # a block within another one counts as that one's
            return forward(*args, **kwargs) if name is None else self._block(name, forward, args, kwargs)

        return through

    def parts(self) -> tuple[Part, list[Part], Part]:
        """(before, blocks, after). After a backward."""
        kept, flops, sent = self.before or (self.meter.outside, *self.all)
        ran = [name for name in self._blocks if name not in self._twins]
        end = self._sent()
        back = {name: self._ended.get(name, end) - self._begun.get(name, end) for name in ran}
        results = dict(zip(self._blocks, self.meter.results(), strict=True))
        kinds = (results, self.handed, self.flops, self.sent, back, self.arguments, self.shared, self.again)
        own = {name: Part(*(cast("Any", kind)[name] for kind in kinds)) for name in ran}
        after = Part(
            Measured(self.meter.outside - kept, 0, 0),
            0,
            self.all[0] - flops - sum(part.flops for part in own.values()),
            self.all[1] - sent - sum(part.sent_forward for part in own.values()),
            (self._begun.get(ran[-1], end) if ran else end) - self.all[1],
        )
        before = Part(Measured(kept, 0, 0), 0, flops, sent, end - self._ended.get(ran[0], end) if ran else 0)
        return before, [own[self._twins.get(name, name)] for name in self._blocks], after


def measured(
    model: nn.Module,
    config: Config,
    names: Sequence[str],
    batch: Any,
    tensor: int = 1,
    samples: int | None = None,
) -> MicroBatch:
    """Runs one micro-batch of the batch's shapes, on one of `tensor` ranks that share layers; the model stays.

    names: of the blocks, in the order of their calls. samples: rows of the micro-batch, instead of the batch's.
    Errors: ConfigError, naming what the forward cannot do without memory, or what a team of so many ranks cannot share.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = _fresh(batch, samples or samples_of(batch))
        copied = _without_memory(model, dtype_of(config))
        exchanges = None
        if tensor > 1:
            exchanges = _Exchanges(tensor)
            specs = json.loads(_C.config_section(config, "tensor_parallel"))["partition_config"]
            split_model(
                copied,
                Team(cast("Any", exchanges)),
                specs["layer_specs"],
                specs["use_default_specs"],
                check=False,
                sequence_parallel_norms=json.loads(_C.config_section(config, "parallel"))["sequence_parallel_norms"],
            )
            exchanges.bytes = 0
        run = _Run({f"{number} {name}": copied.get_submodule(name) for number, name in enumerate(names)}, exchanges)
        try:
            output = run.forward(copied, lambda: call_with(copied, given))
            _loss_of(output).backward()  # type: ignore[no-untyped-call, unused-ignore]
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"plan: the forward of {type(model).__name__} cannot run without memory: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; give a batch as the model takes it, or plan "
                "without one"
            ) from error
    return MicroBatch(*run.parts(), _tokens_of(given))


def call_with(model: nn.Module, batch: Any) -> Any:
    """The model's forward, as the engine's train_batch calls it."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
