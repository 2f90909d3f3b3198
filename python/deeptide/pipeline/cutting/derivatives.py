# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives that a model takes in its forward: a stage that has a part of their graph alone refuses them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deeptide.pipeline.passing.elsewhere import ElsewhereError
from deeptide.pipeline.passing.given import Given
from deeptide.pipeline.passing.letters import is_as_received, is_handed, tensors_in

_thread = threading.local()  # .border: of the forward that runs
_CURE = "differentiate inside one block, or train the model without a pipeline"


@functools.cache
def _install() -> None:
    """Once, and for good: grad() and backward() come here however a program has imported them."""
    plain: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined, unused-ignore]

    @functools.wraps(plain)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        border = getattr(_thread, "border", None)
        if border is not None:
            border.check(outputs, args[3])
        return plain(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined, assignment, unused-ignore]
    for name in ("register_hook", "retain_grad"):
        setattr(torch.Tensor, name, _watched(getattr(torch.Tensor, name)))


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        border = getattr(_thread, "border", None)
        if border is not None:
            border.check_hook(tensor)
        return plain(tensor, *args, **kwargs)

    return method


class Border:
    """The border before a stage's part of a forward. While that runs, derivatives over it are errors.

    One with respect to what an earlier stage may have used lacks the part that goes over that stage.
    """

    def __init__(self) -> None:
        self._first_node = -1  # the number of autograd's first node of this stage's part
        self._arguments: Any = None  # of the block that runs
        self._chain: set[Any] = set()  # the nodes of what the block before handed on

    @contextlib.contextmanager
    def watching(self, part: int, received: Any) -> Iterator[None]:
        """Around a forward; the first part has all that comes before it. received: what the block before handed on."""
        _install()
        self._first_node, self._arguments = -1, None
        self._chain = {tensor.grad_fn for tensor in tensors_in(received)} if part > 0 else set()
        _thread.border = self if part > 0 else None
        try:
            yield
        finally:
            _thread.border = None

    def begin_own(self) -> None:
        """The first block of this stage, or of a later one, is called."""
        if self._first_node < 0:
            self._first_node = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined, unused-ignore]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls an own block."""
        self._arguments = args, kwargs
        try:
            return function(*args, **kwargs)
        finally:
            self._arguments = None

    def check(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Errors: ElsewhereError if a part of this derivative is on an earlier stage."""
        received = _received_by(outputs)
        if received and not (inputs and all(self._is_complete(tensor, received) for tensor in inputs)):
            raise ElsewhereError(
                f"torch.autograd.{'grad' if inputs else 'backward'} differentiates what comes of values that an "
                f"earlier stage has sent, and that stage has the rest of the graph: {_CURE}"
            )

    def check_hook(self, tensor: torch.Tensor) -> None:
        """Errors: ElsewhereError if an earlier stage has computed this value, too, and has a part of its gradient."""
        if self._arguments is not None or tensor.grad_fn is None or is_as_received(tensor):
            return
        received = _received_by([tensor])
        if received and not received & self._chain:
            raise ElsewhereError(
                "a hook is registered on a value, or its gradient retained, that is computed between blocks of what an "
                "earlier block returned: each stage that uses it has a part of its gradient. Register the hook on the "
                "block's output, or compute the value in a module that calls the block"
            )

    def _is_complete(self, tensor: torch.Tensor, received: set[Any]) -> bool:
        """Whether no value of an earlier stage was computed from a tensor."""
        node = tensor.grad_fn
        if is_as_received(tensor) and node is not None:
            return received <= {node}
        if node is not None:
            number: int = node._sequence_nr()
            return 0 <= self._first_node <= number or bool(_received_by([tensor]))
        if isinstance(tensor, torch.nn.Parameter):
            return True  # of this stage: one that an earlier stage lends is none here
        return self._arguments is not None and all(tensor is not node for node in Given(*self._arguments).nodes)


def _received_by(outputs: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of what this stage has received in the graph of `outputs`."""
    rest = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(rest)
    while rest:
        for node, _ in rest.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                rest.append(node)
    return {node for node in seen if is_handed(node)}


def refuse_transforms() -> None:
    """Checks a call of a block. Errors: ElsewhereError within a transform of torch.func, or with dual numbers."""
    transforms = torch._C._functorch.peek_interpreter_stack()  # type: ignore[attr-defined, unused-ignore]
    if transforms is not None or torch.autograd.forward_ad._current_level >= 0:
        raise ElsewhereError(
            "a block is called within a transform of torch.func or a forward derivative, which does not reach other "
            f"stages: {_CURE}"
        )


def watch_hooks(value: torch.Tensor, path: str, has_begun: Callable[[], bool]) -> None:
    """Hooks of a value that skips blocks run on the stage that computes it, with its whole gradient."""

    def register(hook: Any, *_: Any) -> RemovableHandle:
        if has_begun():
            raise ElsewhereError(
                f"a hook is registered on the output of '{path}' where a later stage runs, which has a part of its "
                "gradient: register it before the next block is called"
            )
        return RemovableHandle(OrderedDict())

    value.register_hook = register  # type: ignore[method-assign]
    value.retain_grad = lambda: None  # type: ignore[method-assign]
