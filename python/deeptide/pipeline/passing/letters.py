# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Sends tensors in any nesting between stages, under a header that says what comes.

They travel through the host's memory: what lies on a device is copied from there, and to the receiver's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from deeptide import _C

HEADER_BYTES = 1024  # of what is always sent; a longer header goes on in a tensor of its own
_LENGTH_BYTES = 8


class Subject(NamedTuple):
    """The subject of a letter: both ends name it, and the receiver compares."""

    kind: str  # "activation", "gradient", "tied weights of …"
    micro_batch: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in step {self.step}"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_in(item)]
    return []


class _Handed(torch.autograd.Function):
    """The tensor itself, but no leaf of autograd's nor a view of one: blocks may write into it."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        """Shares its memory."""
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradient as it came."""
        return gradients[0]


def handed(received: Any) -> Any:
    """Makes what a stage has received safe for its first block to write into."""
    if not torch.is_grad_enabled():
        return received
    apply: Any = _Handed.apply
    return tree_map_only(torch.Tensor, lambda tensor: apply(tensor) if tensor.requires_grad else tensor, received)


def is_as_received(tensor: torch.Tensor) -> bool:
    """Whether no layer of this stage has computed it: it is a leaf of autograd's, or handed() made it of one."""
    return tensor.is_leaf or is_handed(tensor.grad_fn)


def is_handed(node: Any) -> bool:
    """Whether handed() made a node of autograd's."""
    handed_node: Any = _Handed
    return type(node) is handed_node._backward_cls


def _encoded(tree: Any, numbers: Iterator[int]) -> Any:
    """A tree as JSON has it, with a number for each tensor."""
    if isinstance(tree, torch.Tensor):
        return {"tensor": next(numbers)}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [_encoded(item, numbers) for item in tree]}
    if type(tree) is dict and all(isinstance(key, (str, int)) for key in tree):
        return {"dict": [[key, _encoded(item, numbers)] for key, item in tree.items()]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(
        f"a stage hands on {type(tree).__name__}, expected tensors, numbers, texts and None in tuples, lists and "
        "dictionaries"
    )


def _decoded(code: Any, tensors: list[torch.Tensor]) -> Any:
    (kind, content), *_ = code.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decoded(item, tensors) for key, item in content}
    if kind == "value":
        return content
    items = [_decoded(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


# The types and shapes of a letter's tensors.
_Shapes = list[tuple[str, list[int]]]


class _Line:
    """One direction between two stages: what both ends know of the letters so far.

    Where the last two letters had the same shapes, the receiver takes it that the next one has them too, and asks for
    its tensors before it has seen the header. A sender that has others sends empty ones of those shapes first.
    """

    def __init__(self) -> None:
        self.shapes: _Shapes | None = None
        self.is_steady = False

    def note(self, shapes: _Shapes) -> None:
        self.is_steady = shapes == self.shapes
        self.shapes = shapes

    def expected(self) -> list[torch.Tensor]:
        """Memory for the tensors that are taken to come; none where nobody knows."""
        if not self.is_steady or self.shapes is None:
            return []
        return [_empty(dtype, shape) for dtype, shape in self.shapes]


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host: the bytes leave later, and a layer may write to what it has returned, as to a buffer."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _shapes_of(tensors: list[torch.Tensor]) -> _Shapes:
    for tensor in tensors:
        if tensor.is_nested:
            raise TypeError(
                "a stage hands on a nested tensor, which does not travel: make torch.nn.TransformerEncoder with "
                "enable_nested_tensor=False; other tensors: to_padded_tensor()"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"a stage hands on a tensor of layout {tensor.layout}, expected a dense one: to_dense()")
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]


def _header(subject: Subject, tree: Any, tensors: list[torch.Tensor], shapes: _Shapes) -> list[torch.Tensor]:
    traits = [(tensor.requires_grad, not tensor.is_cpu) for tensor in tensors]
    text = json.dumps([subject, _encoded(tree, iter(range(len(tensors)))), shapes, traits]).encode()
    room = HEADER_BYTES - _LENGTH_BYTES
    data = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:room].ljust(room)
    parts = [data] if len(text) <= room else [data, text[room:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


class _Incoming(NamedTuple):
    """A letter that was asked for: its header, and the tensors that it is taken to have."""

    header: int
    tensors: list[tuple[torch.Tensor, int | None]]


class Letters:
    """Sends and receives trees. Letters of one stage come in the order in which they were sent."""

    def __init__(self, stage: _C.PipelineStage, device: torch.device) -> None:
        """device: of this stage's parameters; the CPU where it has none."""
        self._stage = stage
        self._device = device if device.type != "cpu" else torch.accelerator.current_accelerator() or device
        self._out: dict[int, _Line] = {}
        self._in: dict[int, _Line] = {}
        self._asked: dict[int, _Incoming] = {}
        self._due: dict[int, int] = {}
        self._mixes = False
        self._aside: dict[tuple[int, Subject], Any] = {}

    def begin(self, due: Mapping[int, int], mixes: bool = False) -> None:
        """Asks for the first letter of each stage, which then comes while this one computes; `due`: how many come.

        mixes: activations and gradients come from one stage, in an order of its own, so each is kept until it is
        received.
        """
        self._due, self._mixes = dict(due), mixes
        self._aside.clear()
        for source, count in due.items():
            if count > 0:
                self._ask(source)

    def extend(self, due: Mapping[int, int]) -> None:
        """Expects more letters after those that are due."""
        for source, count in due.items():
            self._due[source] = self._due.get(source, 0) + count
            if source not in self._asked and self._due[source] > 0:
                self._ask(source)

    def send(self, subject: Subject, tree: Any, to: int, is_own: bool = False) -> None:
        """Sends the tensors' values of this moment; returns at once.

        is_own: nobody writes to them later, so those in the host's memory are sent without a copy.
        """
        tensors = tensors_in(tree)
        shapes = _shapes_of(tensors)
        line = self._out.setdefault(to, _Line())
        as_expected = line.is_steady and shapes == line.shapes
        first, last = (tensors, []) if as_expected else (line.expected(), tensors)
        header, *rest = _header(subject, tree, tensors, shapes)
        for tensor in (header, *first, *rest, *last):
            if tensor.numel() > 0:
                self._stage.send(tensor.detach().cpu() if is_own else _copied(tensor), to)
        line.note(shapes)

    def receive(self, subject: Subject, source: int) -> Any:
        """Waits for the next letter of that stage. Tensors that have a gradient at the sender require one.

        Errors: RuntimeError if it is about something else: the stages' programs differ.
        """
        if (source, subject) in self._aside:
            return self._aside.pop((source, subject))
        got, value = self._next(source)
        while got != subject:
            if not self._mixes or got.step != subject.step or self._due.get(source, 0) < 1:
                raise RuntimeError(
                    f"stage {self._stage.index} expected {subject} from stage {source}, and got {got}: the stages' "
                    "programs differ; call train_batch and eval_batch alike on all ranks"
                )
            self._aside[source, got] = value
            got, value = self._next(source)
        return value

    def _next(self, source: int) -> tuple[Subject, Any]:
        """The next letter's subject and content."""
        if source not in self._asked:
            self._ask(source)
        incoming = self._asked.pop(source)
        subject, code, traits, tensors = self._open(incoming, source)
        self._due[source] = self._due.get(source, 1) - 1
        if self._due[source] > 0:
            self._ask(source)
        values = []
        for each, (needs_grad, on_device) in zip(tensors, traits, strict=True):
            value = self._taken(*each)
            values.append((value.to(self._device) if on_device else value).requires_grad_(needs_grad))
        return subject, _decoded(code, values)

    def _ask(self, source: int) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        letter = self._stage.expect(header, source)
        line = self._in.setdefault(source, _Line())
        self._asked[source] = _Incoming(letter, [self._expected(tensor, source) for tensor in line.expected()])

    def _expected(self, tensor: torch.Tensor, source: int) -> tuple[torch.Tensor, int | None]:
        return tensor, self._stage.expect(tensor, source) if tensor.numel() > 0 else None

    def _taken(self, tensor: torch.Tensor, letter: int | None) -> torch.Tensor:
        return tensor if letter is None else self._stage.receive(letter)

    def _open(
        self, incoming: _Incoming, source: int
    ) -> tuple[Subject, Any, list[tuple[bool, bool]], list[tuple[torch.Tensor, int | None]]]:
        """Reads the header, and asks for its tensors where they are others than was taken for granted."""
        data = self._stage.receive(incoming.header).numpy().tobytes()
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        text, tensors = data[_LENGTH_BYTES : _LENGTH_BYTES + length], incoming.tensors
        line = self._in[source]
        if length > len(text):
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            text += self._taken(*self._expected(rest, source)).numpy().tobytes()
        subject, code, shapes, traits = json.loads(text)
        shapes = [(dtype, shape) for dtype, shape in shapes]
        if not line.is_steady or shapes != line.shapes:
            for each in tensors:
                self._taken(*each)
            tensors = [self._expected(_empty(dtype, shape), source) for dtype, shape in shapes]
        line.note(shapes)
        return Subject(*subject), code, traits, tensors
