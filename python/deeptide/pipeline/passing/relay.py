# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Forwards in which every stage has all values, as generate() needs them: who computes a module's output sends it.

Each stage runs the model's program to its end. A block, or a module around the blocks, that another stage has is
computed on shapes here, so that a cache of keys knows its length, and returns what came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deeptide import _C
from deeptide._model.recomputation import in_backward
from deeptide._process import generators as random_numbers
from deeptide.pipeline.cutting.digest import digest
from deeptide.pipeline.errors import PipelineError, reduce
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError, MadeElsewhere, elsewhere_in
from deeptide.pipeline.passing.letters import Letters, Subject, tensors_in

if TYPE_CHECKING:
    from deeptide.pipeline.cutting.ties import Ties

_Placed = list[tuple[str, torch.nn.Module, int]]  # path, module, and the stage that computes it
_Whole = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Relay:
    """One stage's part. `whole`: the engine's way to call a function of the model inside `open`."""

    def __init__(self, here: int, num_stages: int, placed: _Placed, ties: Ties) -> None:
        """placed: the blocks, and modules around them that have parameters."""
        self.here, self._num_stages, self._placed, self._ties = here, num_stages, placed, ties
        self.is_open = False
        self.whole: _Whole | None = None
        self._number = 0  # of `open` so far
        self._has_sent = False
        self._stage: _C.PipelineStage | None = None
        self._letters: Letters | None = None

    def connect(self, stage: _C.PipelineStage, device: torch.device, whole: _Whole) -> None:
        """Once the stage's engine is made."""
        self._stage, self._letters, self.whole = stage, Letters(stage, device), whole

    @contextmanager
    def open(self, given: Any) -> Iterator[None]:
        """Inside, the model and its modules compute whole outputs on all stages. Collective over all ranks.

        given: what the program calls the model with, equal on all stages. Random numbers are those of the first stage's
        generators, in the order of the uncut model; the others have their own again at the end.

        Errors: ValueError, on all stages, if their tensors differ.
        """
        assert self._stage is not None and self._letters is not None
        self._number += 1
        own = random_numbers.states()
        self._compare(digest(tensors_in(given), with_floats=True), own)
        if not self._ties.is_open:
            self._ties.exchange_values(self._letters, self._number, training=False)
        before = [module.__dict__.get("forward") for _, module, _ in self._placed]
        for path, module, stage in self._placed:
            module.__dict__["forward"] = functools.partial(self._forward, path, stage, module, module.forward)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            for (_, module, _), forward in zip(self._placed, before, strict=True):
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward
            if self.here > 0:
                random_numbers.set_states(own)
        self._flush()
        self._stage.meet()  # ranks of this stage may generate more

    def _compare(self, mark: int, generators: list[torch.Tensor]) -> None:
        others = [stage for stage in range(self._num_stages) if stage != self.here]
        for stage in others:
            self._send_to(stage, "the call", [mark, generators if self.here == 0 else []])
        got = {stage: self._receive("the call", stage) for stage in others}
        assert self._stage is not None
        self._stage.begin_step()
        for stage, (its, _) in got.items():
            if its != mark:
                raise ValueError(
                    f"stages {self.here} and {stage} call the model with other tensors: all stages of a pipeline call "
                    "it and generate() with the same ones"
                )
        if self.here > 0:
            random_numbers.set_states(got[0][1])

    # -- modules ------------------------------------------------------------------------------------------------------

    def _forward(
        self, path: str, stage: int, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The output of a module that a stage has: computed there, and sent to the others.

        Errors: PipelineError if it needs what no module around the blocks returns, or stages call it differently.
        """
        block = module.__dict__.get("_deeptide_block")
        # Arguments of blocks follow from other modules' outputs, and looking at their numbers would wait for a device.
        mark = digest(tensors_in((args, kwargs)), with_floats=False) if block is None else 0
        if stage == self.here:
            return self._own(path, forward, args, kwargs, mark)
        try:
            with MadeElsewhere(path):
                args, kwargs = _bare(block, path, args, kwargs)
                shapes = forward(*args, **kwargs)
        except ElsewhereError as error:
            raise PipelineError(f"{path} cannot be computed on shapes on stage {self.here}: {error}") from error
        self._flush()  # whoever takes what this stage has sent does so before it sends more
        its, generators, values = self._receive(path, stage)
        if its != mark:
            raise PipelineError(
                f"{path} is called with other arguments on stages {stage} and {self.here}: the stages' programs "
                "differ, as by a branch on the rank or by tokens that each stage draws for itself"
            )
        if generators:
            random_numbers.set_states(generators)
        return self._filled(path, shapes, values)

    def _own(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mark: int
    ) -> Any:
        for tensor in elsewhere_in((args, kwargs)):
            raise PipelineError(
                f"{path} is called with what depends on '{tensor.origin}' otherwise than as a module returns it, and "
                f"another stage than {self.here} has that: call the module that holds the weight"
            )
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
        generators = random_numbers.states()
        output = forward(*args, **kwargs)
        if any(tensor._version != version for tensor, version in given):
            raise PipelineError(
                f"{path} writes into what it is called with, and the other stages of the pipeline do not see that"
            )
        after = random_numbers.states()
        moved = [] if random_numbers.are_equal(after, generators) else after
        # Programs write into what a module returned, and letters leave later.
        values = [leaf.detach().clone() for leaf in _tensors(output)]
        for stage in range(self._num_stages):
            if stage != self.here:
                self._send_to(stage, path, [mark, moved, values])
        return output

    def _filled(self, path: str, shapes: Any, values: list[torch.Tensor]) -> Any:
        """An output's shapes with values."""
        expected = [tuple(leaf.shape) for leaf in _tensors(shapes)]
        if expected != [tuple(value.shape) for value in values]:
            raise PipelineError(
                f"{path} returns tensors of shapes {[tuple(value.shape) for value in values]}, expected {expected} as "
                f"stage {self.here} infers them: its shapes depend on values"
            )
        coming = iter(values)
        return tree_map_only(torch.Tensor, lambda _: next(coming).requires_grad_(False), shapes)

    def check_output(self, output: Any) -> None:
        """Errors: PipelineError if an output has what a block computes inside, and does not return."""
        for tensor in elsewhere_in(output):
            raise PipelineError(
                f"the output depends on '{tensor.origin}' otherwise than as a block or a module around the blocks "
                "returns it, and another stage has that; leave it out, as by output_attentions=False"
            )

    # -- letters ------------------------------------------------------------------------------------------------------

    def _send_to(self, stage: int, what: str, content: Any) -> None:
        assert self._letters is not None
        self._letters.send(Subject(what, 0, self._number), content, stage)
        self._has_sent = True

    def _receive(self, what: str, stage: int) -> Any:
        assert self._letters is not None
        return self._letters.receive(Subject(what, 0, self._number), stage)

    def _flush(self) -> None:
        assert self._stage is not None
        if self._has_sent:
            self._stage.flush()
        self._has_sent = False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bare(block: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments without bytes, of a block those that it is handed: it may write into them."""

    def bare(tree: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: Elsewhere(t, path) if t.is_floating_point() else t, tree)

    if block is None:
        return bare(args), bare(kwargs)
    made: tuple[tuple[Any, ...], Any] = block.put_in(bare(block.take_apart(args, kwargs)[0]), args, kwargs)
    return made


def relayed(kind: type, relay: Relay, is_running: Callable[[], bool]) -> type:
    """A model's class whose calls without gradients, and generate(), give whole outputs on every stage.

    is_running: whether a step of the engine's runs the model.
    """

    def is_inside() -> bool:
        return relay.is_open or relay.whole is None or torch.is_grad_enabled() or is_running() or in_backward()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = super(made, self).__call__
        if is_inside():
            return forward(*args, **kwargs)

        def checked(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            relay.check_output(output)
            return output

        assert relay.whole is not None
        return relay.whole(checked, args, kwargs)

    names: dict[str, Any] = {"__call__": call, "__reduce_ex__": reduce}
    if callable(getattr(kind, "generate", None)):

        @functools.wraps(kind.generate)  # type: ignore[attr-defined]
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            forward = super(made, self).generate
            if relay.is_open or relay.whole is None:
                return forward(*args, **kwargs)
            return relay.whole(forward, args, kwargs)

        names["generate"] = generate
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made: Any = type(kind.__name__, (kind,), {**names, **about})
    return cast("type", made)
