# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Multiply-accumulates, flops, parameters and latency of a model by module, counted at torch's dispatcher.

Products are those of matrix products, convolutions, recurrent layers and attention, which is what the usual formulae
count: flops are twice as many. What may multiply and has no formula here is named beside the totals. Backward's are
counted, not estimated, and belong to the module whose forward they differentiate.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deeptide import _C
from deeptide._engine.flops_table import write_table
from deeptide._model.recomputation import in_backward
from deeptide.accelerator import get_accelerator


@dataclass
class ModuleProfile:
    """One module and all within it."""

    name: str
    kind: str
    params: int = 0
    macs: int = 0
    bwd_macs: int = 0
    latency: float = 0.0  # of forward, in seconds
    calls: int = 0
    children: list[ModuleProfile] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Flops of forward."""
        return 2 * self.macs

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        return {
            "name": self.name,
            "type": self.kind,
            "params": self.params,
            "macs": self.macs,
            "flops": self.flops,
            "bwd_macs": self.bwd_macs,
            "bwd_flops": 2 * self.bwd_macs,
            "latency_s": self.latency,
            "calls": self.calls,
            "children": [child.to_json() for child in self.children],
        }


def to_text(value: float, unit: str = "", precision: int = 2) -> str:
    """Such as "1.25 G": with a thousand's prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.{precision}f} {prefix}{unit}"
    return f"{value:.{precision}f} {unit}".rstrip()


def duration_text(seconds: float) -> str:
    """Such as "12.5 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def _uncounted(*_: Any) -> None:
    """The hook of a copied module."""


def _hook_of_a_copy() -> Callable[..., None]:
    return _uncounted


class _Hook:
    """A profiler's hook on a module. A module that is copied or pickled meanwhile is not profiled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_a_copy, ()


class FlopsProfiler:
    """Profiles what runs between start_profile() and stop_profile(), on the thread that calls them."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = getattr(model, "module", model) if ds_engine is not None else model
        self._engine = weakref.ref(ds_engine) if ds_engine is not None else None  # which holds this profiler
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.duration = self.backward_s = 0.0
        self._hooks: list[Any] = []
        self._counter = _C.OperatorCounter()
        self._modules = list(self.model.named_modules())
        self._latency: dict[int, float] = {}
        self._calls: dict[int, int] = {}
        self._stack: list[tuple[int, float]] = []
        self._begun = 0.0

    @property
    def ds_engine(self) -> Any:
        """The engine that was given; None without one."""
        return self._engine() if self._engine is not None else None

    # -- DeepSpeed's calls --------------------------------------------------------------------------------------

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Begins anew. Modules of the types in `ignore_list` are counted as part of what holds them."""
        self.end_profile()
        self.reset_profile()
        ignored = tuple(ignore_list or ())
        self._modules = list(self.model.named_modules())
        for index, (_, module) in enumerate(self._modules):
            if ignored and isinstance(module, ignored):
                continue
            self._hooks.append(module.register_forward_pre_hook(_Hook(partial(self._enter, index))))
            self._hooks.append(module.register_forward_hook(_Hook(self._leave), always_call=True))
        self._begun = self._now()
        self._counter.start()
        self.started = True

    def stop_profile(self) -> None:
        """Ends the count; the results stay until end_profile or the next start."""
        if not self.started:
            return
        self._counter.stop()
        self.duration = self._now() - self._begun
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.started = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Times a backward, for the table's latencies."""
        begun = self._now()
        try:
            yield
        finally:
            self.backward_s += self._now() - begun

    def reset_profile(self) -> None:
        """Forgets the results."""
        self.duration = self.backward_s = 0.0
        self._latency, self._calls, self._stack = {}, {}, []
        self._counter = _C.OperatorCounter()

    def end_profile(self) -> None:
        """Ends all of it."""
        self.stop_profile()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Flops of the model's forward."""
        flops = self.profile().flops
        return to_text(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of the model's forward."""
        macs = self.profile().macs
        return to_text(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds that the model's forward took."""
        latency = self.profile().latency
        return duration_text(latency) if as_string else latency

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters, shared ones once."""
        params = self.profile().params
        return to_text(params) if as_string else params

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Experts are not sliced."""
        return False

    def get_backward_macs(self) -> int:
        """Multiply-accumulates of backward, with what a checkpoint computes again."""
        return self.profile().bwd_macs

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
        step_latency: float | None = None,
        bwd_latency: float | None = None,
    ) -> None:
        """Writes the table to `output_file`, JSON if its name ends so, else to standard output."""
        facts = self._facts(profile_step, step_latency, bwd_latency)
        if output_file is not None and output_file.endswith(".json"):
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(json.dumps({**facts, "model": self.profile().to_json()}, indent=1) + "\n")
            return
        text = write_table(self.profile(), facts, module_depth, top_modules, detailed)
        if output_file is None:
            print(text, file=sys.stdout, flush=True)
            return
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(output_file).write_text(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Writes the part about depths to standard output."""
        print(write_table(self.profile(), None, module_depth, top_modules, False), flush=True)

    # -- results ------------------------------------------------------------------------------------------------

    def profile(self) -> ModuleProfile:
        """The tree of modules, each with what lies within it."""
        own = [[0, 0] for _ in self._modules]
        loose = [0, 0]
        for use in self._counter.uses():
            place = own[use.module] if use.module >= 0 else loose
            place[int(use.backward)] += use.macs
        nodes: dict[str, ModuleProfile] = {}
        for index, (name, module) in enumerate(self._modules):
            node = ModuleProfile(name, type(module).__name__, params=_count(module))
            node.macs, node.bwd_macs = own[index]
            node.latency, node.calls = self._latency.get(index, 0.0), self._calls.get(index, 0)
            nodes[name] = node
            if name:
                nodes[_parent(name, nodes)].children.append(node)
        root = nodes[""]
        root.macs, root.bwd_macs = root.macs + loose[0], root.bwd_macs + loose[1]
        _add_up(root)
        return root

    def uncounted(self) -> dict[str, int]:
        """Calls of operators that may multiply and have no formula here, by name: no total holds them."""
        calls: dict[str, int] = {}
        for use in self._counter.uses():
            if use.is_uncounted:
                calls[use.name] = calls.get(use.name, 0) + use.calls
        return calls

    def mfu(self, seconds: float) -> tuple[float | None, float]:
        """(share of the measured peak, that peak in flop/s) of forward and backward within `seconds`.

        The share is None where it is more than 1: the product that was measured was not the fastest.
        """
        root = self.profile()
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        device = weight.device if weight is not None else torch.device("cpu")
        peak = _C.measure_peak(device, weight.dtype if weight is not None else torch.float32)
        recomputed = self.recompute_fwd_factor * root.macs
        share = peak.share_of(2 * (root.macs + root.bwd_macs - recomputed), seconds)
        return share if share >= 0 else None, peak.flops_per_s

    def _facts(self, step: int, step_latency: float | None, bwd_latency: float | None) -> dict[str, Any]:
        root, engine = self.profile(), self.ds_engine
        facts: dict[str, Any] = {
            "profile_step": step,
            "world_size": getattr(engine, "world_size", 1),
            "params": root.params,
            "fwd_macs": root.macs,
            "fwd_flops": root.flops,
            "fwd_latency_s": root.latency,
            "bwd_flops": 2 * root.bwd_macs,
            "bwd_latency_s": bwd_latency,
            "step_latency_s": step_latency,
            "uncounted_calls": self.uncounted(),
        }
        if engine is not None:
            facts["batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
        if bwd_latency:
            iteration = root.latency + bwd_latency + (step_latency or 0.0)
            share, peak = self.mfu(root.latency + bwd_latency)
            facts |= {"iter_latency_s": iteration, "peak_flops_per_s": peak, "mfu": share}
            if engine is not None:
                facts["samples_per_s"] = engine.train_micro_batch_size_per_gpu() * engine.world_size / iteration
        return facts

    # -- hooks --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        get_accelerator().synchronize()
        return time.perf_counter()

    def _enter(self, index: int, *_: Any) -> None:
        # In backward the host waits for no device: ranks that wait for this one may have to go on first.
        self._stack.append((index, 0.0 if in_backward() else self._now()))
        self._counter.set_module(index)

    def _leave(self, *_: Any) -> None:
        if not self._stack:
            return
        index, begun = self._stack.pop()
        if not in_backward():
            self._latency[index] = self._latency.get(index, 0.0) + self._now() - begun
            self._calls[index] = self._calls.get(index, 0) + 1
        self._counter.set_module(self._stack[-1][0] if self._stack else -1)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parent(name: str, nodes: dict[str, ModuleProfile]) -> str:
    """The nearest module above: a name may hold dots of its own."""
    while "." in name:
        name = name.rsplit(".", 1)[0]
        if name in nodes:
            return name
    return ""


def _add_up(node: ModuleProfile) -> None:
    for child in node.children:
        _add_up(child)
        node.macs += child.macs
        node.bwd_macs += child.bwd_macs
    if node.calls == 0 and node.children:  # a list of modules, which nobody calls
        node.latency = sum(child.latency for child in node.children)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, macs, params) of one call: `input_shape` of ones, or `args` and `kwargs`. mode: "forward", "generate".

    Errors: ValueError without any input, or on another mode.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f'mode: got {mode!r}, expected "forward" or "generate"')
    given, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        if type(input_shape) is not tuple or not input_shape:
            raise ValueError(f"input_shape: got {input_shape!r}, expected a tuple of sizes such as (1, 3, 224, 224)")
        weight = next(iter(model.parameters()), torch.empty(0))
        given = [torch.ones(input_shape, dtype=weight.dtype, device=weight.device)]
    if not given and not named:
        raise ValueError("get_model_profile needs input_shape, args or kwargs: what the model is called with")
    call = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*given, **named)  # type: ignore[operator]
            profiler.start_profile(ignore_modules)
            call(*given, **named)  # type: ignore[operator]
            profiler.stop_profile()
    finally:
        profiler.end_profile()
        model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
