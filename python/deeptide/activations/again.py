# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One block's forward: recomputed in backward, to the bit as it was, or with what it keeps elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from deeptide._C import ConfigError
from deeptide._model.recomputation import is_kept_as_it_is, repeatable
from deeptide.activations.measure import Kept, Meter, unchanged, with_version
from deeptide.activations.spill import SpilledBlock, Store

_Place = tuple[torch.nn.Module, str]  # of a buffer: the module that holds it, and its name there


class _Buffers:
    """A block's buffers that its forward writes, as those of a batch norm: recomputation finds them as they were."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._written: dict[bool, set[_Place]] = {}  # by the block's mode, training or not; absent: not seen yet

    def _all(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer

    @contextlib.contextmanager
    def kept(self) -> Iterator[dict[_Place, torch.Tensor]]:
        """Around a forward; holds, afterwards, the values before it of those that it wrote.

        The first forward of a mode compares values, for an operator may write without telling autograd, as batch_norm.
        """
        now = [(place, buffer, buffer._version) for place, buffer in self._all()]
        known = self._written.get(self._module.training)
        wanted = [(place, buffer) for place, buffer, _ in now if known is None or place in known]
        values = {place: buffer.detach().clone() for place, buffer in wanted}
        yield values
        written = self._written.setdefault(self._module.training, set())
        for place, buffer, version in now:
            after = place[0]._buffers.get(place[1])
            is_equal = after is buffer and buffer._version == version
            if not is_equal or (known is None and not torch.equal(values[place], buffer)):
                written.add(place)
        for place in [place for place in values if place not in written]:
            del values[place]

    @contextlib.contextmanager
    def as_they_were(self, values: dict[_Place, torch.Tensor]) -> Iterator[None]:
        """Inside, copies of these values are in their places."""
        now = {(module, name): module._buffers[name] for module, name in values}
        for (module, name), value in values.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


def _is_cache(value: object) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _is_recomputed_around() -> bool:
    """Whether torch's checkpoint keeps nothing here, because the program asked it to, or another block of ours."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


class Block:
    """One block of the model. mode: "keep", "recompute" or "spill"."""

    def __init__(self, name: str, module: torch.nn.Module, mode: str) -> None:
        self.name, self.module, self.mode = name, module, mode
        self.kind = type(module).__name__
        self.meter: Meter | None = None  # while it is measured
        self.taken: type | None = None  # the module's class whose forward comes here
        self._spilled: SpilledBlock | None = None
        self._buffers = _Buffers(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module belongs to no engine."""

    def spill_to(self, store: Store) -> None:
        """Has what it keeps lie there from now on."""
        self.mode, self._spilled = "spill", SpilledBlock(self.module, store)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, with gradients. One of another stage, on shapes, is none of what the policy is for."""
        if is_kept_as_it_is():
            return call(*args, **kwargs)
        if self.mode == "spill" and self._spilled is not None:
            with contextlib.nullcontext() if _is_recomputed_around() else self._spilled.hooks():
                return call(*args, **kwargs)
        args, kwargs = self._without_cache(args, kwargs)
        if self.mode == "keep" or _is_recomputed_around():
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False, **kwargs)
        return self._recomputed(call, args, kwargs) if self._is_trained((args, kwargs)) else call(*args, **kwargs)

    def _is_trained(self, arguments: Any) -> bool:
        """Whether backward passes through it; else it keeps nothing, and recomputation would keep its inputs."""
        leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        return any(leaf.requires_grad for leaf in (*leaves, *self.module.parameters()))

    def _recomputed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count, names = len(args), list(kwargs)
        has_run = False
        before: dict[_Place, torch.Tensor] = {}
        used: list[Kept] = []  # parameters as the forward left them

        def function(*values: Any) -> Any:
            nonlocal has_run, before, used
            given, named = values[:count], dict(zip(names, values[count:], strict=True))
            if has_run:
                for kept in used:
                    unchanged(kept)
                with self._buffers.as_they_were(before), self._timed():
                    return call(*given, **named)
            has_run = True
            with self._buffers.kept() as before, self._timed(), self._counted((args, kwargs)):
                outputs = call(*given, **named)
            used = [with_version(parameter) for parameter in self.module.parameters()]
            return outputs

        # All by position: torch keeps the generators of the devices of these, and notices if one is written later.
        values = (*args, *kwargs.values())
        return torch.utils.checkpoint.checkpoint(repeatable(function), *values, use_reentrant=False)

    def _timed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.meter is None else self.meter.timed(self.name)

    def _counted(self, arguments: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.meter is None else self.meter.block(self.name, arguments)

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Without an empty cache of keys and values of Transformers, to which recomputation would append once more.

        Errors: ConfigError if it holds something.
        """
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if not caches:
            return args, kwargs
        layer = next((m.layer_idx for m in self.module.modules() if hasattr(m, "layer_idx")), 0)
        length = max(int(cache.get_seq_length(layer)) for cache in caches)
        if length > 0:
            raise ConfigError(
                f"activation_checkpointing.policy: {self.name} is called with the keys and values of {length} earlier "
                "tokens, to which recomputation would append once more; call the model with use_cache=False, or leave "
                "the policy out"
            )
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        return args, {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs
