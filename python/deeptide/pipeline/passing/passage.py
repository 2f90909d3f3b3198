# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A forward of a cut model on one stage: which blocks run, which are passed over, what comes in and what is handed on.

Every stage runs the model's own program. Blocks of earlier stages are passed over and give tensors without bytes, as
does what the first stage computes before them. At the first of its own blocks the stage puts in what the stage before
handed on; at the first block of the next stage it ends, with what that block was called with. A program that
calls none of a stage's blocks goes on without them: what came is handed on.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide._model.recomputation import in_backward, kept_as_they_are
from deeptide.pipeline.cutting.digest import digest
from deeptide.pipeline.errors import NotCopied, PipelineError
from deeptide.pipeline.passing.carried import CARRIED, completed, is_carried, placed, take_in
from deeptide.pipeline.passing.derived import Derived
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError, MadeElsewhere, elsewhere_in, with_received
from deeptide.pipeline.passing.hidden import Hidden
from deeptide.pipeline.passing.letters import tensors_in
from deeptide.pipeline.passing.relay import Relay
from deeptide.pipeline.passing.skips import Skips, with_zeros

if TYPE_CHECKING:
    from deeptide.pipeline.cutting.blocks import Chain
    from deeptide.pipeline.cutting.calls import Calls

_VOID = object()  # the output of a forward that lacked a value
_PROGRAMS_DIFFER = "the stages' programs differ, as by a branch on the rank, random numbers of Python or their batches"


class _HandedOn(BaseException):
    """Ends a forward where the next stage's blocks begin. No Exception: a model's own handlers must let it through."""

    def __init__(self, value: Any) -> None:
        super().__init__("a stage of a pipeline ends its forward here")
        self.value = value


class _NoDraws(TorchDispatchMode):
    """Refuses random numbers, which would be others on each stage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and next(elsewhere_in((args, kwargs)), None) is None:
            raise ElsewhereError(
                f"{func} draws random numbers before this stage's blocks, and each stage would draw others; draw them "
                "in a block, or give them with the batch"
            )
        return func(*args, **(kwargs or {}))


class _Block(NotCopied):
    """One block, as a passage knows it: one call of a module, which has others where it is called `again`."""

    def __init__(self, number: int, module: torch.nn.Module) -> None:
        self.number = number
        names = list(inspect.signature(module.forward).parameters)
        self._first = names[0] if names else ""
        self._hooks = [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.outputs: dict[Any, Any] = {}  # of forwards that were passed over, by what they were called with
        self.again: list[_Block] = []

    def is_observed(self) -> bool:
        """Whether somebody looks at what happens inside it."""
        return any(self._hooks)

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, Any]]:
        """(what a block is handed, what it is called with besides)."""
        if args:
            return args[0], (args[1:], kwargs)
        return kwargs.get(self._first), ((), {key: value for key, value in kwargs.items() if key != self._first})

    def put_in(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments with another value handed, if any is."""
        if not args and self._first not in kwargs:
            return args, kwargs
        return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, self._first: value})


class Passage:
    """The forwards of one stage. parts: of each block of the chain; part p belongs to stage p % num_stages.

    Where the chain `carries`, all that the next stage's first block is called with and that depends on parameters
    travels, since blocks are given more than the one before returns, as a decoder's are; else what it is handed. A
    chain of one part turns to that where the first forward of a kind shows that its blocks are.
    hidden: by number of a block, what hides values of it that this stage has while its forward passes over it.
    skips: what travels besides to later parts than the next, or for other uses than by blocks.
    relay: of forwards that are none of these, without gradients.
    """

    def __init__(
        self,
        chain: Chain | Calls,
        parts: list[int],
        num_stages: int,
        hidden: dict[int, Hidden],
        skips: Skips,
        relay: Relay,
    ) -> None:
        self._relay = relay
        self._names, self._parts, self._last, self._num_stages = chain.names, parts, parts[-1], num_stages
        self._hidden, self._carries, self._skips = hidden, chain.carries, skips
        self._cure = f"such a model is no chain of blocks: {chain.cure}"
        self._counts: Counter[int] = Counter()  # of the calls of modules that are called again, in this forward
        self._is_inside = False  # a block
        self._here = -1  # the part that runs
        self._is_running = False
        self._received: Any = None
        self._digest: int | None = 0
        self._lacks = False  # a value, in a forward that is made again
        self._at = -1  # the last block that was called
        self._has_begun = False  # an own block, or a later one, was called
        self._known: set[Any] = set()  # signatures of forwards that were looked at
        self._signature: Any = None
        self._guard: _NoDraws | None = None
        self._derived: Derived | None = None  # in the first forward of a kind
        self._stays: dict[Any, set[str]] = {}  # by signature: the places of tensors that all stages have
        self._trains = False  # with gradients
        self._has_ended = False  # at a block of the next stage

    # -- a forward ----------------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], inputs: Any, received: Any, part: int, kind: Any) -> Any:
        """Returns what is handed on, or for the last part the model's output. `received`: of the part before.

        inputs: (args, kwargs) of the model's forward. kind: of this forward, as far as it may need other values.
        None comes and goes where a part could not be computed for want of a value: the forward is made again.

        Errors: PipelineError naming the block and what it needs, if the model is no chain of blocks.
        """
        self._here = part
        if part > 0 and received is None:
            return None
        self._received, self._digest, skips = received if part > 0 else (None, 0, ({}, {}))
        self._carries |= is_carried(self._received)
        self._at, self._has_begun, self._is_running, self._lacks, self._has_ended = -1, False, True, False, False
        self._counts.clear()
        hooks = self._skips.begin(kind, part, skips)
        try:
            output = forward(*inputs[0], **inputs[1])
            if output is _VOID:
                return None
            self._check_end()
            if self._here < self._last and not self._has_ended:
                return {CARRIED: {}} if self._carries else (), _ended_after(self._at), self._skips.handed_on()
            return completed(output) if self._carries and self._here == self._last else output
        finally:
            self._skips.end(hooks)
            self._is_running, self._received = False, None
            if self._lacks:
                self._stays.pop(self._signature, None)

    def compute(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The innermost call of a forward: the model itself, up to where this stage ends."""
        modes = module.training, torch.is_grad_enabled()
        self._trains = torch.is_grad_enabled()
        self._signature = (self._here, *modes, *kind_of(args, kwargs))
        if self._here > 0 and self._signature not in self._known:
            self._guard = _NoDraws()  # type: ignore[no-untyped-call, unused-ignore]
            self._guard.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        self._watch(at_part=0)
        try:
            output = module(*args, **kwargs)
        except _HandedOn as end:
            self._has_ended, output = True, end.value
        except ElsewhereError as error:
            if not self._goes_without(error.tensors):
                raise PipelineError(f"{self._where()}: {error}; {self._cure}") from error
            output = _VOID
        finally:
            self._end_guard()
            self._end_watch()
        if not self._lacks:
            self._known.add(self._signature)
        return output

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]

    def _watch(self, at_part: int) -> None:
        """Begins to note what depends on parameters, where a later part needs to know for the first time."""
        if min(self._here, 1) == at_part and self._here < self._last and self._signature not in self._stays:
            self._derived = Derived()
            self._derived.note((self._received, self._skips.received))

    def _end_watch(self) -> None:
        derived, self._derived = self._derived, None
        if derived is not None:
            derived.end()

    def _where(self) -> str:
        chunk, stage = divmod(self._here, self._num_stages)
        return f"stage {stage} of {self._num_stages}" + (f", chunk {chunk}" if self._last >= self._num_stages else "")

    def _name(self, number: int) -> str:
        return self._names[number]

    def _check_end(self) -> None:
        if self._here > 0 and not self._has_begun and self._digest not in (None, _ended_after(self._at)):
            raise PipelineError(
                f"{self._where()}: the model's forward ended after "
                f"{'none' if self._at < 0 else self._name(self._at)} of its blocks, and stage {self._before()} went on "
                f"to another one: {_PROGRAMS_DIFFER}"
            )

    def _before(self) -> int:
        return (self._here - 1) % self._num_stages

    def _goes_without(self, tensors: Iterable[Elsewhere]) -> bool:
        """Whether a forward goes on without what these tensors need, noted for the next one."""
        tensors = list(tensors)
        if not tensors or not self._skips.is_open() or self._skips.note(tensors) is not None:
            return False
        self._lacks = True
        self._known.discard(self._signature)  # also where the loss lacks it, after the forward
        return True

    def is_running(self) -> bool:
        """Whether a step of the engine's runs the model."""
        return self._is_running

    def lacks(self, error: ElsewhereError) -> bool:
        """Whether an error of the loss means that the forward is made again."""
        return self._goes_without(error.tensors)

    def check_output(self, what: str, value: Any) -> None:
        """Errors: PipelineError if it holds anything of another stage that does not come in the next forward."""
        for tensor in elsewhere_in(value):
            if self._goes_without([tensor]):
                continue
            raise PipelineError(
                f"{self._where()}: {what} depends on '{tensor.origin}' otherwise than through the chain of blocks, and "
                "an earlier stage has that. A weight that is used before and after the blocks must be held by a module "
                f"on either side (head.weight = embedding.weight); else {self._cure}"
            )

    # -- blocks -------------------------------------------------------------------------------------------------------

    def enter(self, block: _Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called; inside another one, as what a tower has may be called by itself too, it is none."""
        if in_backward():
            return self._again(block, call, args, kwargs)
        if self._relay.is_open or self._is_inside:
            return call(*args, **kwargs)
        if not self._is_running:
            raise PipelineError(
                f"{self._name(block.number)}: the model is cut into {self._num_stages} stages; call "
                "engine.train_batch() and engine.eval_batch(), on all ranks, or without gradients the whole model and "
                "its generate()"
            )
        block, part = self._this_call(block)
        if block.number <= self._at:
            raise PipelineError(
                f"{self._where()}: block {self._name(block.number)} was called after {self._name(self._at)}, expected "
                f"each block once, in order; {self._cure}"
            )
        self._at, self._is_inside = block.number, True
        self._skips.enter(block.number)
        try:
            if part < self._here:
                output = self._pass_over(block, call, args, kwargs)
                if self._digest == _ended_after(block.number):
                    self._end_guard()
                    self._skips.begin_own()
                return output
            output = self._compute_block(part, block, call, args, kwargs)
            return self._skips.returned(self._name(block.number), output)
        finally:
            self._is_inside = False
            self._skips.enter(-1)

    def _this_call(self, block: _Block) -> tuple[_Block, int]:
        """(the block that a call is, its part), by the number of the call. More calls than are known are the last."""
        if block.again:
            calls = [block, *block.again]
            count = self._counts[block.number]
            self._counts[block.number] += 1
            block = calls[min(count, len(calls) - 1)]
        return block, self._parts[block.number]

    def _compute_block(
        self, part: int, block: _Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An own block's output; a block of a later part ends the forward."""
        self._end_guard()
        args, kwargs = with_received((args, kwargs)) if self._carries else (args, kwargs)
        if not self._has_begun:
            self._has_begun = True
            self._skips.begin_own()
            args, kwargs = self._begin(block, args, kwargs)
            self._watch(at_part=1)
        if part > self._here:
            self._hand_on(block, args, kwargs)
        if not self._check_arguments(block, (args, kwargs)):
            args, kwargs = with_zeros((args, kwargs))
        return call(*args, **kwargs) if self._derived is None else self._derived.call(call, args, kwargs)

    def _hand_on(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handed, besides = block.take_apart(args, kwargs)
        carried = self._carried(handed, besides, dict(placed((args, kwargs))))
        sent = {CARRIED: carried} if self._carries else handed
        for tensor in elsewhere_in(sent):
            if not self._goes_without([tensor]):
                raise ElsewhereError(f"what {self._name(block.number)} is called with depends on '{tensor.origin}'")
        sent = with_zeros(sent) if self._lacks else sent
        number = None if self._lacks else digest((block.number, besides), with_floats=False)
        raise _HandedOn((sent, number, self._skips.handed_on()))

    def _carried(self, handed: Any, besides: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `given`, the tensors of the call by their places, that the next stage lacks."""
        derived = self._derived
        if derived is not None:
            self._carries |= any(map(derived.has, tensors_in(besides)))
            main = {id(tensor) for tensor in tensors_in(handed)}
            self._stays[self._signature] = {p for p, t in given.items() if id(t) not in main and not derived.has(t)}
        return {place: tensor for place, tensor in given.items() if place not in self._stays[self._signature]}

    def _begin(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments of the first block of this stage or a later one, with what the stage before handed on."""
        if self._here == 0:
            return args, kwargs
        has_carried = is_carried(self._received)
        is_alike = not has_carried or take_in((args, kwargs), self._received[CARRIED])
        args, kwargs = with_received((args, kwargs)) if has_carried else (args, kwargs)
        handed, besides = block.take_apart(args, kwargs)
        is_whole = self._check_arguments(block, besides) and self._digest is not None
        differs = is_whole and (not is_alike or self._digest != digest((block.number, besides), with_floats=False))
        if differs or _is_end(self._digest):
            raise PipelineError(
                f"{self._where()}: {self._name(block.number)} is called with other arguments than stage "
                f"{self._before()} ended with, or in the place of another block: {_PROGRAMS_DIFFER}"
            )
        if self._trains and not torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(self._received)):
            raise ElsewhereError(
                f"block {self._name(block.number)} is called without gradients though it is handed some, as by a "
                "reentrant checkpoint around the call: give that use_reentrant=False"
            )
        if has_carried:
            return args, kwargs
        for tensor in elsewhere_in(handed):
            tensor.handed = self._received  # type: ignore[attr-defined] # for a recomputation
        return block.put_in(self._received, args, kwargs)

    def _check_arguments(self, block: _Block, arguments: Any) -> bool:
        """Whether nothing is lacking. Errors: ElsewhereError if it is, and does not come in the next forward."""
        lacking = list(elsewhere_in(arguments))
        for tensor in lacking:
            if not self._goes_without([tensor]):
                raise ElsewhereError(
                    f"block {self._name(block.number)} is called with a value besides what the block before it "
                    f"returns, which depends on '{tensor.origin}' of another stage"
                )
        return not lacking

    def _again(self, block: _Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A checkpoint around the call computes it again, from the arguments that it had."""
        if self._carries:
            args, kwargs = with_received((args, kwargs))
            return call(*args, **kwargs)
        handed, _ = block.take_apart(args, kwargs)
        for tensor in elsewhere_in(handed):
            args, kwargs = block.put_in(tensor.handed, args, kwargs)  # type: ignore[attr-defined]
        return call(*args, **kwargs)

    def _pass_over(self, block: _Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block of an earlier stage: its output without bytes, computed from shapes where they are new."""
        handed, besides = block.take_apart(args, kwargs)
        leaves = [*tree_leaves(handed), *(tensors_in(besides) if self._carries else ())]
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        key = (self._signature, *map(str, shapes))
        if key in block.outputs and self._signature in self._known and not block.is_observed():
            output = tree_map_only(Elsewhere, Elsewhere.again, block.outputs[key])  # values are of one micro-batch
            return self._skips.returned(self._name(block.number), output)
        output = self._on_shapes(block, call, handed, args, kwargs)
        block.outputs[key] = self._skips.without_values(output, self._name(block.number))
        return self._skips.returned(self._name(block.number), output)

    def _on_shapes(
        self, block: _Block, call: Callable[..., Any], handed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A block of an earlier stage, but for what is computed from values that came: hooks see those.

        Where none is handed to it, gradients begin with the first one that a module inside returns. A checkpoint before
        that, as in the forward of Transformers' blocks, so has no effect: it could not compute the block again.
        """
        origin, has_values = self._name(block.number), bool(self._skips.received)

        def bare(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if isinstance(tensor, Elsewhere) or self._skips.came(tensor) else Elsewhere(tensor, origin)

        args, kwargs = block.put_in(tree_map_only(torch.Tensor, bare, handed), args, kwargs)
        hidden = self._hidden.get(block.number)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        with (
            torch.set_grad_enabled(has_values and trains),
            kept_as_they_are() if has_values else nullcontext(),
            nullcontext() if hidden is None else hidden(),
            _NoDraws() if has_values else nullcontext(),  # type: ignore[no-untyped-call, unused-ignore]
            MadeElsewhere(origin),
        ):
            return call(*args, **kwargs)


def _ended_after(block: int) -> int:
    """In the place of a digest: the program ended without a block of a later part, and this one was its last."""
    return -2 - block


def _is_end(number: int | None) -> bool:
    return number is not None and number < 0


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The kinds of a forward's arguments, as far as they may change a model's program."""
    return (*map(_kind, args), *map(_named_kind, kwargs.items()))


def _kind(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, str)) else type(value).__name__


def _named_kind(item: tuple[str, Any]) -> Any:
    return item[0], _kind(item[1])


def stage_blocks(blocks: list[torch.nn.Module], passage: Passage) -> None:
    """Makes each call of a block one of the passage's. The blocks' classes are derived from what they were."""
    kinds: dict[type, type] = {}
    firsts: dict[int, _Block] = {}
    for number, module in enumerate(blocks):
        known = _Block(number, module)
        if firsts.setdefault(id(module), known) is not known:
            firsts[id(module)].again.append(known)
            continue
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _staged(kind, passage)
        module.__class__ = kinds[kind]
        module.__dict__["_deeptide_block"] = known


def _staged(kind: type, passage: Passage) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return passage.enter(self._deeptide_block, super(made, self).__call__, args, kwargs)

    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    made: Any = type(kind.__name__, (kind,), names)
    return cast("type", made)
