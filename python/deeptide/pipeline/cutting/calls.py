# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a model without a chain of blocks between calls of its modules, in the order of one forward without values."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide._C import ConfigError
from deeptide._model.changes import Structure
from deeptide.pipeline.partition import balanced
from deeptide.pipeline.passing.elsewhere import ElsewhereError
from deeptide.pipeline.passing.hidden import Hidden, state_of
from deeptide.pipeline.step.undo import Buffers

_UNEVEN = 1.25  # times the mean: calls inside of the costliest part's are looked at, to make it less
_CURE = "call deeptide.pipeline.show_example(model, batch) before, with what its forward takes"

_examples: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def show_example(model: torch.nn.Module, batch: Any) -> None:
    """Tells what a model's forward takes, for `"cut": "by_operator"`; call it before `initialize`, alike on all ranks.

    batch: an argument, a tuple of arguments, or a dictionary of keywords; its tensors may have any number of rows.
    """
    _examples[model] = batch


class Call:
    """One call of a module. used: ids of parameters that it computes with itself, outside of the calls inside it."""

    def __init__(self, path: str, module: torch.nn.Module, region: object) -> None:
        """region: the recomputation that the call lies in, None where in none."""
        self.path, self.module, self.region = path, module, region
        self.used: dict[int, int] = {}  # with their numbers of elements
        self.inner: list[Call] = []

    def uses(self) -> dict[int, int]:
        """The parameters that it computes with, also in calls inside."""
        found = dict(self.used)
        for call in self.inner:
            found |= call.uses()
        return found

    def opened(self) -> list[Call]:
        """The calls inside that use parameters; none where the whole is recomputed."""
        return [call for call in self.inner if call.uses()] if self.region is None else []


class _Watch(TorchDispatchMode):
    """Notes the calls of all modules, and the parameters that operators in them are given."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._model = model
        self._stack = [Call("", model, None)]
        self._stand_ins: dict[int, torch.nn.Parameter] = {}
        self._around = _region()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            parameter = self._stand_ins.get(id(leaf))
            if parameter is not None:
                self._stack[-1].used[id(parameter)] = parameter.numel()
        return func(*args, **(kwargs or {}))

    def root(self) -> Call:
        """The call of the model itself."""
        return self._stack[0].inner[0]

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Inside, parameters and buffers beside them are tensors of other stages, and calls are noted."""
        with ExitStack() as held:
            places = []
            for path, module in self._model.named_modules():
                if any(parameter is not None for parameter in module._parameters.values()):
                    places += list(state_of(path, module))
                held.callback(module.register_forward_pre_hook(self._entry_of(path)).remove)
                held.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            held.enter_context(Hidden(places)())
            for _, module, name in places:
                if module._parameters.get(name) is not None:
                    self._stand_ins[id(module.__dict__[name])] = module._parameters[name]  # type: ignore[assignment]
            held.enter_context(self)
            yield

    def _entry_of(self, path: str) -> Callable[..., None]:
        def enter(module: torch.nn.Module, given: Any) -> None:
            region = _region()
            call = Call(path, module, None if region is self._around else region)
            self._stack[-1].inner.append(call)
            self._stack.append(call)

        return enter

    def _leave(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self._stack.pop()


def _region() -> object:
    """Names the checkpoint around: by its hooks for autograd; one with reentrance is another one at each call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None else None if torch.is_grad_enabled() else object()


def _examples_for(model: torch.nn.Module) -> Iterator[Any]:
    """Yields micro-batches that the model may take, in its type and where it is."""
    from deeptide.tensor.cutting.examples import examples_of

    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def fitting(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(first.device, first.dtype if tensor.is_floating_point() else tensor.dtype)

    found = [_examples[model]] if model in _examples else examples_of(model)
    yield from (tree_map_only(torch.Tensor, fitting, example) for example in found)


def _called(model: torch.nn.Module, example: Any) -> Call:
    """The calls of one forward of training. Errors: those of the forward."""
    buffers, structure, modes = (
        Buffers(model),
        Structure(model),
        [(module, module.training) for module in model.modules()],
    )
    watch = _Watch(model.train())
    try:
        with watch.without_values(), torch.enable_grad():
            if isinstance(example, dict):
                model(**example)
            else:
                model(*example) if isinstance(example, (tuple, list)) else model(example)
    finally:
        buffers.restore()
        replaced = structure.restore()
        for module, mode in modes:
            module.training = mode
    if replaced:
        raise ValueError(f"it puts another module in the place of '{replaced}'")
    return watch.root()


def calls_of(model: torch.nn.Module) -> Call:
    """The model's call. Errors: ConfigError if no example is known, or its forward needs values."""
    name, first = type(model).__name__, None
    for example in _examples_for(model):
        try:
            return _called(model, example)
        except Exception as error:
            first = first or error
    if first is None:
        raise ConfigError(
            f'parallel.pipeline.cut is "by_operator", and what the forward of {name} takes is not known; {_CURE}'
        )
    if isinstance(first, ElsewhereError):
        raise ConfigError(
            f'parallel.pipeline.cut is "by_operator", and the forward of {name} does not go without values: {first}'
        ) from first
    raise ConfigError(
        f'parallel.pipeline.cut is "by_operator", and the forward of {name} fails on the example: '
        f"{type(first).__name__}: {first}; {_CURE}"
    ) from first


class Calls:
    """Calls of modules in the order of the program, in the place of blocks: a module may be called twice."""

    carries = True  # a call's arguments are more than what the one before returned
    cure = "write it as a deeptide.pipeline.PipelineModule"

    def __init__(self, root: Call, calls: list[Call]) -> None:
        """root: the model's own call, which the others lie in."""
        self.root, self.calls = root, calls

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The module of each call."""
        return [call.module for call in self.calls]

    @property
    def names(self) -> list[str]:
        """Their paths in the model."""
        return [call.path for call in self.calls]

    @property
    def modules(self) -> set[int]:
        """The ids of the modules that are called, and of all modules within."""
        return {id(module) for call in self.calls for module in call.module.modules()}

    def lies_in(self, path: str) -> bool:
        """Whether the module of that path has any of those that are called inside."""
        return any(not path or name.startswith(path + ".") for name in self.names)

    def weights(self) -> list[float]:
        """The elements of the parameters that each call computes with."""
        return [float(sum(call.uses().values())) for call in self.calls]

    def bounds(self, num_parts: int) -> list[int]:
        """Bounds of parts by parameters. A part ends with no call whose recomputation has another one after it."""
        starts = [
            number
            for number, call in enumerate(self.calls)
            if number == 0 or call.region is None or call.region is not self.calls[number - 1].region
        ]
        if len(starts) < num_parts:
            return []
        weights = self.weights()
        ends = [*starts[1:], len(weights)]
        runs = [sum(weights[begin:end]) for begin, end in zip(starts, ends, strict=True)]
        return [[*starts, len(weights)][bound] for bound in balanced(runs, num_parts)]

    def uses(self, model: torch.nn.Module, parts: list[int]) -> dict[int, list[int]]:
        """The parts that use a module, by its id: all, if a parameter is used between the calls; the first, if none."""
        of_parameters: dict[int, set[int]] = {}
        of_modules: dict[int, set[int]] = {}
        for call, part in zip(self.calls, parts, strict=True):
            for key in call.uses():
                of_parameters.setdefault(key, set()).add(part)
            for module in call.module.modules():
                of_modules.setdefault(id(module), set()).add(part)
        everywhere = set(range(parts[-1] + 1))
        of_parameters |= dict.fromkeys(self._used_between(), everywhere)
        return {
            id(module): sorted(
                set().union(
                    of_modules.get(id(module), ()),
                    *(of_parameters.get(id(parameter), ()) for parameter in module.parameters(recurse=False)),
                )
            )
            or [0]
            for module in model.modules()
        }

    def _used_between(self) -> Iterator[int]:
        inside = set(map(id, self.calls))
        rest = [self.root]
        while rest:
            call = rest.pop()
            if id(call) not in inside:
                yield from call.used
                rest += call.inner


def _most(calls: Calls, bounds: list[int]) -> float:
    weights = calls.weights()
    return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(bounds))


def cut_calls(model: torch.nn.Module, num_parts: int) -> tuple[Calls, list[int]]:
    """(calls, bounds of the parts). Calls are taken apart as long as that makes parts more equal.

    Errors: ConfigError if the model has too few calls of modules, or as `calls_of`.
    """
    root = calls_of(model)
    calls, best, best_bounds = Calls(root, [root]), None, list[int]()
    while True:
        bounds, weights = calls.bounds(num_parts), calls.weights()
        if bounds and (best is None or _most(calls, bounds) < _most(best, best_bounds)):
            best, best_bounds = calls, bounds
        if bounds and _most(calls, bounds) <= _UNEVEN * sum(weights) / num_parts:
            break
        costliest = max(itertools.pairwise(bounds), key=lambda ends: sum(weights[slice(*ends)]), default=(0, None))
        inside = [i for i in range(len(weights))[slice(*costliest)] if calls.calls[i].opened()]
        if not inside:
            break
        at = max(inside, key=weights.__getitem__)
        calls = Calls(root, [*calls.calls[:at], *calls.calls[at].opened(), *calls.calls[at + 1 :]])
    if best is None:
        raise ConfigError(
            f'parallel.pipeline.cut is "by_operator", and the forward of {type(model).__name__} has '
            f"{len(calls.calls)} calls of modules with parameters for {num_parts} parts that it could be cut between; "
            "take fewer stages"
        )
    return best, best_bounds
