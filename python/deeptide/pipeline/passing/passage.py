# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A forward of a cut model on one stage: which blocks run, which are passed over, what comes in and what is handed on.

Every stage runs the model's own program. Blocks of earlier stages are passed over and give tensors without bytes, as
does what the first stage computes before them. At the first of its own blocks the stage puts in what the stage before
handed on; at the first block of the next stage it ends, with what that block was called with. A program that
calls none of a stage's blocks goes on without them: what came is handed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_map_only

from deeptide._model.recomputation import in_backward, kept_as_they_are
from deeptide._process import generators
from deeptide.pipeline.cutting import derivatives
from deeptide.pipeline.cutting.digest import are_alike, digest, sums_of
from deeptide.pipeline.errors import PipelineError, reduce
from deeptide.pipeline.passing import draws
from deeptide.pipeline.passing.carried import CARRIED, completed, is_carried, placed, take_in, with_values
from deeptide.pipeline.passing.derived import Derived
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError, MadeElsewhere, elsewhere_in, with_received
from deeptide.pipeline.passing.given import Block, Given, Looks
from deeptide.pipeline.passing.hidden import Hidden
from deeptide.pipeline.passing.kinds import Kinds
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


class Passage:
    """The forwards of one stage. parts: of each block of the chain; part p belongs to stage p % num_stages.

    Where the chain `carries`, all that the next stage's first block is called with and that depends on parameters
    travels, since blocks are given more than the one before returns, as a decoder's are; else what it is handed. A
    chain of one part turns to that where the first forward of a kind shows that its blocks are.
    hidden: by number of a block, what hides values of it that this stage has while its forward passes over it.
    skips: what travels besides to later parts than the next, or for other uses than by blocks.
    relay: of forwards that are none of these, without gradients. kinds: of the model's forwards.
    """

    def __init__(
        self,
        chain: Chain | Calls,
        parts: list[int],
        num_stages: int,
        hidden: dict[int, Hidden],
        skips: Skips,
        relay: Relay,
        kinds: Kinds,
    ) -> None:
        self._relay, self._kinds, self._kind = relay, kinds, None
        self._names, self._parts, self._last, self._num_stages = chain.names, parts, parts[-1], num_stages
        self._hidden, self._carries, self._skips = hidden, chain.carries, skips
        self._cure = f"such a model is no chain of blocks: {chain.cure}"
        self._counts: Counter[int] = Counter()  # of the calls of modules that are called again, in this forward
        self._is_inside = False  # a block
        self._here = -1  # the part that runs
        self._is_running = False
        self._received: Any = None
        self._digest: list[Any] | int | None = 0  # what the part before says of its end
        self._lacks = False  # a value, in a forward that is made again
        self._at = -1  # the last block that was called
        self._has_begun = False  # an own block, or a later one, was called
        self._known: set[Any] = set()  # signatures of forwards that were looked at
        self._signature: Any = None
        self._guard, self._border = draws.NoDraws(), derivatives.Border()
        self._drawn = 0  # a mark of Python's generators where the forward began
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
        self._kind = kind
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
        self._trains = torch.is_grad_enabled()
        self._signature = self._kinds.signature(self._here, self._kind, args, kwargs)
        if self._here > 0:
            self._drawn = draws.mark()
            self._guard.begin()
        self._watch(at_part=0)
        try:
            with self._border.watching(self._here, self._received):
                output = module(*args, **kwargs)
        except _HandedOn as end:
            self._has_ended, output = True, end.value
        except ElsewhereError as error:
            if not self._goes_without(error.tensors):
                raise PipelineError(f"{self._where()}: {error}; {self._cure}") from error
            output = _VOID
        except StopIteration as error:
            raise PipelineError(
                f"{self._where()}: the model takes the first of no values, as by next(module.parameters()) of a module "
                "whose parameters another stage has: ask the inputs for their type and device"
            ) from error
        except RuntimeError as error:
            if "differentiated Tensor" not in str(error):
                raise
            raise PipelineError(
                f"{self._where()}: {error} The model calls torch.autograd.grad in its forward, and this stage has a "
                "part of the graph alone: differentiate inside one block, or train the model without a pipeline"
            ) from error
        finally:
            self._guard.end()
            self._end_watch()
        if not self._lacks:
            self._known.add(self._signature)
        return output

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
        """Whether a forward goes on without what these tensors need, noted for the next one.

        In a settled kind it is made again whatever lacks: it needs what no forward of its kind has needed before.
        """
        tensors = list(tensors)
        if not tensors or (self._skips.is_open() and self._skips.note(tensors) is not None):
            return False
        self._lacks = True
        self._known.discard(self._signature)  # also where the loss lacks it, after the forward
        return True

    def is_running(self) -> bool:
        """Whether a step of the engine's runs the model."""
        return self._is_running

    def is_void(self) -> bool:
        """Whether the last forward, or its loss, lacked a value though its kind is settled: the kind opens again."""
        return self._lacks and not self._skips.is_open()

    def note_output(self, output: Any) -> None:
        """The last part's output, where the program gets it."""
        self._lacks |= not self._skips.note_output(output)

    def open_again(self, kind: Any) -> None:
        """Forwards of a kind are looked at as if there had been none."""
        self._skips.open_again(kind)
        self._known.clear()
        self._stays.clear()

    def lacks(self, error: ElsewhereError) -> bool:
        """Whether an error of the loss means that the forward is made again."""
        return self._goes_without(error.tensors)

    def check_output(self, what: str, value: Any, in_step: bool) -> None:
        """Errors: PipelineError if it holds anything of another stage that does not come in the next forward.

        in_step: a forward that lacks a value may still be made again.
        """
        for tensor in elsewhere_in(value):
            if in_step and self._goes_without([tensor]):
                continue
            raise PipelineError(
                f"{self._where()}: {what} depends on '{tensor.origin}' otherwise than through the chain of blocks, and "
                "an earlier stage has that. A weight that is used before and after the blocks must be held by a module "
                f"on either side (head.weight = embedding.weight); else {self._cure}"
            )

    # -- blocks -------------------------------------------------------------------------------------------------------

    def enter(self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        derivatives.refuse_transforms()
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
                    self._guard.end()
                    self._skips.begin_own()
                return output
            output = self._compute_block(part, block, call, args, kwargs)
            return self._skips.returned(self._name(block.number), output)
        finally:
            self._is_inside = False
            self._skips.enter(-1)

    def _this_call(self, block: Block) -> tuple[Block, int]:
        """(the block that a call is, its part), by the number of the call. More calls than are known are the last."""
        if block.again:
            calls = [block, *block.again]
            count = self._counts[block.number]
            self._counts[block.number] += 1
            block = calls[min(count, len(calls) - 1)]
        return block, self._parts[block.number]

    def _compute_block(
        self, part: int, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An own block's output; a block of a later part ends the forward."""
        self._guard.end()
        args, kwargs = with_received((args, kwargs)) if self._carries else (args, kwargs)
        if not self._has_begun:
            self._has_begun = True
            self._skips.begin_own()
            self._border.begin_own()
            args, kwargs = self._begin(block, args, kwargs)
            self._watch(at_part=1)
        if part > self._here:
            self._hand_on(block, args, kwargs)
        if not self._check_arguments(block, (args, kwargs)):
            args, kwargs = with_zeros((args, kwargs))
        call = partial(self._border.call, call)
        return call(*args, **kwargs) if self._derived is None else self._derived.call(call, args, kwargs)

    def _hand_on(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(tensor.is_nested for tensor in tensors_in((args, kwargs))):
            raise PipelineError(
                f"{self._where()}: {self._name(block.number)} is called with a nested tensor, which does not travel "
                "between stages: make torch.nn.TransformerEncoder with enable_nested_tensor=False, which in evaluation "
                "then computes padding as in training; other tensors: to_padded_tensor()"
            )
        handed, besides = block.take_apart(args, kwargs)
        carried = self._carried(handed, besides, dict(placed((args, kwargs))))
        sent = {CARRIED: carried} if self._carries else handed
        for tensor in elsewhere_in(sent):
            if not self._goes_without([tensor]):
                raise ElsewhereError(f"what {self._name(block.number)} is called with depends on '{tensor.origin}'")
        sent = with_zeros(sent) if self._lacks else sent
        mark = None if self._lacks else _mark_of(block.number, besides, carried if self._carries else {})
        raise _HandedOn((sent, mark, self._skips.handed_on()))

    def _carried(self, handed: Any, besides: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `given`, the tensors of the call by their places, that the next stage lacks."""
        derived = self._derived
        if derived is not None:
            self._carries |= any(map(derived.has, tensors_in(besides)))
            main = {id(tensor) for tensor in tensors_in(handed)}
            self._stays[self._signature] = {p for p, t in given.items() if id(t) not in main and not derived.has(t)}
        return {place: tensor for place, tensor in given.items() if place not in self._stays[self._signature]}

    def _begin(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments of the first block of this stage or a later one, with what the stage before handed on."""
        if self._here == 0:
            return args, kwargs
        has_carried = is_carried(self._received)
        carried = self._received[CARRIED] if has_carried else {}
        is_alike = take_in((args, kwargs), carried)
        args, kwargs = with_values((args, kwargs), carried) if has_carried else (args, kwargs)
        handed, besides = block.take_apart(args, kwargs)
        is_whole = self._check_arguments(block, besides)
        if self._digest is not None and (is_whole or isinstance(self._digest, int)):
            self._compare(block, self._digest, _mark_of(block.number, besides, carried), is_alike)
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

    def _compare(self, block: Block, theirs: list[Any] | int, own: list[Any], is_alike: bool) -> None:
        """Errors: PipelineError if the stage before ended with other values than this one begins with."""
        if isinstance(theirs, int) or not is_alike or theirs[0] != own[0]:
            raise PipelineError(
                f"{self._where()}: {self._name(block.number)} is called with other arguments than stage "
                f"{self._before()} ended with, or in the place of another block: {_PROGRAMS_DIFFER}"
            )
        if not are_alike(theirs[1:4], own[1:4]):
            raise PipelineError(
                f"{self._where()}: a floating tensor that {self._name(block.number)} is called with besides what the "
                f"block before it returns has other values than on stage {self._before()}. Each stage computes such a "
                "tensor by itself, of its batch: compute it of nothing else, as numbers that are drawn, or draw and "
                "compute it in a block"
            )
        if own[4] != self._drawn and own[4] != theirs[4]:
            raise PipelineError(
                f"{self._where()}: the program draws numbers of Python's generator or NumPy's outside of the blocks, "
                f"and stage {self._before()} has drawn others; call random.seed() and numpy.random.seed() alike on all "
                "ranks that read the same batches, draw in no block besides, or give the numbers with the batch"
            )

    def _check_arguments(self, block: Block, arguments: Any) -> bool:
        """Whether nothing is lacking. Errors: ElsewhereError if it is, and does not come in the next forward."""
        lacking = list(elsewhere_in(arguments))
        for tensor in lacking:
            if not self._goes_without([tensor]):
                raise ElsewhereError(
                    f"block {self._name(block.number)} is called with a value besides what the block before it "
                    f"returns, which depends on '{tensor.origin}' of another stage"
                )
        return not lacking

    def _again(self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A checkpoint around the call computes it again, from the arguments that it had."""
        if self._carries:
            args, kwargs = with_received((args, kwargs))
            return call(*args, **kwargs)
        handed, _ = block.take_apart(args, kwargs)
        for tensor in elsewhere_in(handed):
            args, kwargs = block.put_in(tensor.handed, args, kwargs)  # type: ignore[attr-defined]
        return call(*args, **kwargs)

    def _pass_over(self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block of an earlier stage: its output without bytes, computed from shapes where it is not known."""
        origin = self._name(block.number)

        def bare(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if isinstance(tensor, Elsewhere) or self._skips.came(tensor) else Elsewhere(tensor, origin)

        handed, _ = block.take_apart(args, kwargs)
        args, kwargs = block.put_in(tree_map_only(torch.Tensor, bare, handed), args, kwargs)
        given = Given(args, kwargs)
        if self._signature in self._known and not block.is_observed():
            for output in block.outputs.get(self._signature, given):
                return self._skips.returned(origin, output)
        output, has_looked = self._on_shapes(block, call, args, kwargs)
        if not has_looked and given.is_unchanged(args, kwargs):
            block.outputs.keep(self._signature, given, output)
        return self._skips.returned(origin, output)

    def _on_shapes(
        self, block: Block, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """(the output of a block of an earlier stage, whether it took values out of tensors).

        What is computed from values that came has values, which hooks see. Where none is handed to it, gradients begin
        with the first one that a module inside returns. A checkpoint before that, as in the forward of Transformers'
        blocks, so has no effect: it could not compute the block again.
        """
        has_values = bool(self._skips.received)
        hidden = self._hidden.get(block.number)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        made, looks = MadeElsewhere(self._name(block.number)), Looks()  # type: ignore[no-untyped-call, unused-ignore]
        drawn = generators.of_interpreter()
        with (
            torch.set_grad_enabled(has_values and trains),
            kept_as_they_are() if has_values else nullcontext(),
            nullcontext() if hidden is None else hidden(),
            draws.NoDraws() if has_values else nullcontext(),
            looks,
            made,
        ):
            output = call(*args, **kwargs)
        generators.set_interpreter(drawn)  # it draws on its own stage
        return output, made.has_looked or looks.has_looked


def _ended_after(block: int) -> int:
    """In the place of a digest: the program ended without a block of a later part, and this one was its last."""
    return -2 - block


def _mark_of(number: int, besides: Any, carried: dict[str, torch.Tensor]) -> list[Any]:
    """Marks that both stages of a border must have alike where it is crossed: arguments of a block that do not travel.

    An object's tensors count, and its numbers do not, which may be of a rank.
    """
    plain = [tensor for tensor in tensors_in(besides) if not isinstance(tensor, Elsewhere)]
    seen = set(map(id, plain))
    nodes = [each for each in Given(besides).nodes if isinstance(each, torch.Tensor) and id(each) not in seen]
    inside = [tensor for tensor in nodes if not isinstance(tensor, Elsewhere)]
    travelling = {id(tensor) for tensor in carried.values()}
    mark = digest((number, besides, inside), with_floats=False)
    return [mark, *sums_of(plain + inside, travelling), draws.mark()]


def stage_blocks(blocks: list[torch.nn.Module], passage: Passage) -> None:
    """Makes each call of a block one of the passage's. The blocks' classes are derived from what they were."""
    kinds: dict[type, type] = {}
    firsts: dict[int, Block] = {}
    for number, module in enumerate(blocks):
        known = Block(number, module)
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
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    made: Any = type(kind.__name__, (kind,), names)
    return cast("type", made)
