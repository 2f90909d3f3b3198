# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A model of anybody's, cut along its blocks: each stage keeps its own parameters, and the model its program."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide._engine import batches as _batches
from deeptide._optimizers.groups import OptimizerSource, ParametersSource, _plain_groups
from deeptide.pipeline.cutting.along import find_cut
from deeptide.pipeline.cutting.blocks import Chain, stages_of, uses_of_parameters
from deeptide.pipeline.cutting.calls import Calls
from deeptide.pipeline.cutting.chunks import starts_of
from deeptide.pipeline.cutting.shared_buffers import SharedBuffers
from deeptide.pipeline.cutting.ties import Place, Tie, Ties
from deeptide.pipeline.cutting.uncut import Exchange, Uncut
from deeptide.pipeline.errors import NotCopied
from deeptide.pipeline.passing.elsewhere import Elsewhere, ElsewhereError
from deeptide.pipeline.passing.hidden import Hidden, Repeated, state_of
from deeptide.pipeline.passing.kinds import Kinds
from deeptide.pipeline.passing.passage import Passage, stage_blocks
from deeptide.pipeline.passing.relay import Relay, relayed
from deeptide.pipeline.passing.skips import Skips
from deeptide.pipeline.place import place

_ATTRIBUTE = "_deeptide_cut"  # of the model


class _Taken:
    """A module's contents before its parameters and buffers of other stages were taken out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._parameters, self._buffers = module, dict(module._parameters), dict(module._buffers)

    def take(self, name: str, origin: str, dtype: torch.dtype | None) -> None:
        """A tensor without bytes in the place of a parameter or buffer."""
        tensor: torch.Tensor = getattr(self._module, name)
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
        delattr(self._module, name)
        elsewhere = Elsewhere(like, origin, tensor.device)
        elsewhere.is_held = True
        setattr(self._module, name, elsewhere)

    def put_back(self) -> None:
        """Undoes it."""
        pairs: Any = ((self._parameters, self._module._parameters), (self._buffers, self._module._buffers))
        for held, own in pairs:
            for name in held.keys() - own.keys():
                self._module.__dict__.pop(name, None)
            own.clear()
            own.update(held)


class BlockCut(NotCopied):
    """One stage's part of a model that is cut along its chain of blocks. The model keeps its own forward.

    An encoder and a decoder are one chain. Parameters before the blocks belong to the first stage, those after them to
    the last. A parameter that several stages use, such as a head's that is tied to an embedding, belongs to the first
    of them, which lends it; so do those that the modules around the blocks hold themselves. What a stage has not is an
    Elsewhere tensor there.

    Of several chunks, each stage runs the model's program once per chunk; what other chunks of the stage compute is
    hidden from it as if another stage had it.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None  # of the step that runs
    gives_outputs = False  # to the program, which may compute with all of them
    trained_groups: Container[int] = range(sys.maxsize)  # of the optimizer; all, where the program makes them later

    def __init__(
        self,
        model: torch.nn.Module,
        num_stages: int,
        stage_id: int,
        dtype: torch.dtype | None,
        share: Callable[[], object] | None = None,
        num_chunks: int = 1,
        starts: list[str] | None = None,
    ) -> None:
        """num_chunks: of each stage. starts: as starts_of gives them.

        share: cuts layers among the ranks of a stage, once it is known that the model has blocks to be cut along.
        """
        self.num_stages, self.stage_id, self.num_chunks = num_stages, stage_id, num_chunks
        along = find_cut(model, num_stages, num_chunks, starts)
        chain, parts, self.parts, self._part_uses = along.chain, along.parts, along.bounds, along.uses
        self._model, self._dtype = model, dtype
        self._uncut = Uncut(model)
        self._held: list[_Taken] = []
        self._uses = stages_of(self._part_uses, num_stages)
        if share is not None:
            share()
        self.ties = Ties(self._ties(), stage_id)
        inside = chain.modules
        self._shared_buffers = SharedBuffers(
            (path, module, self._uses[id(module)])
            for path, module in model.named_modules()
            if id(module) in inside and stage_id in self._uses[id(module)]
        )
        self.taken: set[int] = set()  # ids of parameters of other stages, while `undo` may bring them back
        self.relay = Relay(stage_id, num_stages, list(self._placed(chain, parts)), self.ties)
        self._repeated = Repeated(self._repeated_by_chunks(chain) if num_chunks > 1 else (), num_chunks)
        self._take_out(model, chain)
        self._classes = [(module, type(module)) for module in (*chain.blocks, model)]
        own = [number for number, part in enumerate(parts) if part % num_stages == stage_id]
        self.own_blocks = {  # without those that another stage calls, too
            chain.names[number]: chain.blocks[number]
            for number in own
            if self._uses[id(chain.blocks[number])] == [stage_id]
        }
        # One chunk has nothing to hide: it computes with all that its stage has.
        chunks = range(num_chunks if num_chunks > 1 else 0)
        self._hidden = [Hidden(self._unused_by(chain, chunk)) for chunk in chunks]
        hidden = {
            number: self._hidden_block(chain, number)
            for number, block in enumerate(chain.blocks)
            if stage_id in self._uses[id(block)] and (chunks or parts[number] != stage_id)
        }
        self.skips = Skips(model, chain.names)
        self.kinds = Kinds(model)
        self.passage = Passage(chain, parts, num_stages, hidden, self.skips, self.relay, self.kinds)
        stage_blocks(chain.blocks, self.passage)
        model.__class__ = relayed(type(model), self.relay, self.passage.is_running)

    def _places(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter, list[int]]]:
        """(path, module, attribute, parameter, stages that use the module), in the order of all stages."""
        for path, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{path}.{name}" if path else name, module, name, parameter, self._uses[id(module)]

    def _stages_of(self) -> dict[int, list[int]]:
        return uses_of_parameters(self._model, self._uses)

    def _ties(self) -> list[Tie]:
        """The ties of parameters that several stages use: one for each set of stages."""
        stages_of = self._stages_of()
        found: dict[tuple[int, ...], dict[int, list[Place]]] = {}
        names: dict[tuple[int, ...], str] = {}
        for name, module, attribute, parameter, used in self._places():
            stages = tuple(stages_of[id(parameter)])
            if len(stages) == 1:
                continue
            names.setdefault(stages, name)
            places = found.setdefault(stages, {}).setdefault(id(parameter), [])
            places.append(Place(module, attribute, parameter.requires_grad, self.stage_id in used))
        return [Tie(names[stages], list(stages), list(places.values())) for stages, places in found.items()]

    def _take_out(self, model: torch.nn.Module, chain: Chain | Calls) -> None:
        stages_of, here = self._stages_of(), self.stage_id
        blocks = chain.modules
        for path, module in model.named_modules():
            held = _Taken(module)
            foreign = [
                (name, parameter)
                for name, parameter in module._parameters.items()
                if parameter is not None and stages_of[id(parameter)][0] != here
            ]
            is_used = here in self._uses[id(module)]
            has_state = not is_used and (id(module) in blocks or bool(foreign))
            buffers = [name for name, value in module._buffers.items() if value is not None] if has_state else []
            if not foreign and not buffers:
                continue
            self._held.append(held)
            self.taken.update(id(parameter) for _, parameter in foreign)
            for name in [name for name, _ in foreign] + buffers:
                held.take(name, f"{path}.{name}" if path else name, self._dtype)

    def _placed(self, chain: Chain | Calls, parts: list[int]) -> Iterator[tuple[str, torch.nn.Module, int]]:
        """The blocks and the outermost modules with parameters around them; with the stages that compute them."""
        seen: set[int] = set()
        for name, block, part in zip(chain.names, chain.blocks, parts, strict=True):
            if id(block) not in seen:  # which may be called twice
                seen.add(id(block))
                yield name, block, part % self.num_stages
        blocks = chain.modules
        inside: tuple[str, ...] = ()
        for path, module in self._model.named_modules():
            has_parameters = next(module.parameters(), None) is not None
            if id(module) in blocks or chain.lies_in(path) or path.startswith(inside) or not has_parameters:
                continue
            inside = (*inside, path + ".")
            yield path, module, self._uses[id(module)][0]

    def _part(self, chunk: int) -> int:
        return chunk * self.num_stages + self.stage_id

    def _hidden_block(self, chain: Chain | Calls, number: int) -> Hidden:
        """Hides a block that this stage has, or uses in a later call, where it is passed over."""
        modules = chain.blocks[number].named_modules(prefix=chain.names[number])
        return Hidden(itertools.chain.from_iterable(itertools.starmap(self._state_here, modules)))

    def _state_here(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
        """A module's own parameters and buffers, and what this stage borrows for it."""
        yield from state_of(path, module)
        for borrowed in self.ties.borrowed():
            if borrowed.module is module:
                yield f"{path}.{borrowed.attribute}" if path else borrowed.attribute, module, borrowed.attribute

    def _unused_by(self, chain: Chain | Calls, chunk: int) -> Iterator[tuple[str, torch.nn.Module, str]]:
        """Values that this stage has or borrows beside the blocks, and other parts of the model use alone."""
        blocks = chain.modules
        for path, module in self._model.named_modules():
            if id(module) in blocks or self._part(chunk) in self._part_uses[id(module)]:
                continue
            places = list(self._state_here(path, module))
            if any(name not in module._buffers for _, _, name in places):
                yield from places

    def _repeated_by_chunks(self, chain: Chain | Calls) -> Iterator[tuple[torch.nn.Module, str]]:
        """Buffers of modules that every chunk runs: those around the blocks, and those without parameters."""
        blocks = chain.modules
        for path, module in self._model.named_modules():
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if id(module) not in blocks and (chain.lies_in(path) or not has_parameters):
                yield from ((module, name) for name in module._buffers)

    def undo(self) -> None:
        """The model as it was; before `keep`."""
        for block, kind in self._classes:
            block.__class__ = kind
        for held in self._held:
            held.put_back()
        del self._model.__dict__[_ATTRIBUTE]

    def compute(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own forward, on this stage."""
        return self.passage.compute(module, args, kwargs)

    def reads_batches(self) -> bool:
        """Every stage runs the model's whole program."""
        return True

    def split(self, batch: Any) -> tuple[Any, Any]:
        """(arguments of forward, labels) of a micro-batch."""
        args, kwargs, labels = _batches.arguments_of(batch, self.loss_fn)
        return (args, kwargs), labels

    def run_stage(self, forward: Callable[..., Any], inputs: Any, received: Any, chunk: int = 0) -> Any:
        """A forward of this stage. None comes and goes where it lacked a value, and is made again."""
        hidden = self._hidden[chunk]() if self._hidden else nullcontext()
        with self._shared_buffers.unchanged(), self._repeated(chunk), hidden:
            output = self.passage.run(forward, inputs, received, self._part(chunk), self.kind_of(inputs))
        if self.gives_outputs and self._part(chunk) == len(self.parts) - 2:
            self.passage.note_output(output)
        return output

    def begin(self) -> None:
        """Forwards of a step begin, or begin anew."""
        self._repeated.begin()

    def kind_of(self, inputs: Any) -> Any:
        """The kind of a forward, by what may change which values it needs."""
        return self.kinds.of(inputs, self.gives_outputs, self.loss_fn)

    def loss_of(self, output: Any, labels: Any) -> Any:
        """The loss of the last stage's output; None where the forward is made again.

        Errors: ValueError if it is no scalar; PipelineError.
        """
        if output is None and self.skips.is_open():
            return None
        try:
            loss = _batches.loss_of(output, labels, self.loss_fn)
        except ElsewhereError as error:
            if not self.passage.lacks(error):
                raise
            return None
        self.passage.check_output("the loss", loss, in_step=True)
        return loss

    def is_void(self) -> bool:
        """Whether the forward that was made last counts for nothing, since its kind needs more than was known."""
        return self.passage.is_void()

    def open_again(self, kinds: Iterable[Any]) -> None:
        """Lets all stages learn anew what forwards of these kinds need."""
        for kind in kinds:
            self.passage.open_again(kind)

    def trains(self, chunk: int) -> bool:
        """Whether a chunk uses a trained parameter of this stage's, as its only one does."""
        part = self._part(chunk)
        return self.num_chunks == 1 or any(
            part in self._part_uses[id(module)] and any(p.requires_grad for p in module.parameters(recurse=False))
            for module in self._model.modules()
        )

    def check_output(self, output: Any, in_step: bool = False) -> None:
        """Errors: PipelineError if an output that goes to the program holds anything of another stage.

        in_step: before all stages know that the forward lacked nothing.
        """
        self.passage.check_output("the output", output, in_step)

    def copy_whole(self, exchange: Exchange) -> torch.nn.Module:
        """A copy of the uncut model. Collective. exchange: gives other stages tensors by name, and returns theirs."""
        return self._uncut.copy(self._model, self._classes, exchange)

    def keep(self) -> None:
        """Frees what other stages have."""
        self._held.clear()
        self.taken.clear()

    def own(self, given: ParametersSource | None) -> ParametersSource | None:
        """Those of `model_parameters` that this stage has."""
        if given is None or isinstance(given, torch.Tensor):
            return given
        items: Any = list(given)
        groups = _plain_groups(items) if items else []
        self.note_groups(groups)
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in self.taken]
        return groups

    def note_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Notes which of the whole model's optimizer groups are trained."""
        self.trained_groups = {i for i, group in enumerate(groups) if any(p.requires_grad for p in group["params"])}


@contextmanager
def _reduced(optimizer: torch.optim.Optimizer, cut: BlockCut) -> Iterator[None]:
    """Takes other stages' parameters out of an optimizer's groups and states; an error inside brings them back."""
    taken = cut.taken
    cut.note_groups(optimizer.param_groups)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    states = dict(optimizer.state)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in taken]
    for parameter in [p for p in optimizer.state if id(p) in taken]:
        del optimizer.state[parameter]
    try:
        yield
    except BaseException:
        for group, whole in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = whole
        optimizer.state.update(states)
        raise


def cut_of(model: torch.nn.Module) -> BlockCut | None:
    """The model's cut, if it has one."""
    return model.__dict__.get(_ATTRIBUTE)


def groups_of(model: torch.nn.Module) -> Container[int]:
    """Indices of optimizer groups that a stage of the model's may train; none of a model with one stage."""
    cut = cut_of(model)
    if cut is not None:
        return cut.trained_groups
    return range(sys.maxsize if model.num_stages > 1 else 0)  # type: ignore[operator]


def _dtype_of(config: Config) -> torch.dtype | None:
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None


@contextmanager
def cut_by_blocks(
    model: torch.nn.Module,
    config: Config,
    num_stages: int,
    optimizer: OptimizerSource | None,
    parameters: ParametersSource | None,
    world: _C.World | None,
    share: Callable[[], object] | None = None,
    num_chunks: int = 1,
) -> Iterator[ParametersSource | None]:
    """Around the making of an engine: gives this stage's part of `model_parameters`; an error leaves the model whole.

    share: cuts layers among the ranks of a stage first; what it has cut stays so.

    Errors: ConfigError if the model has no blocks to be cut along, or the ranks do not divide among the stages.
    """
    starts = starts_of(config)
    rank, num_ranks = place(world)
    stage_id = _C.stage_of_rank(rank, num_stages, num_ranks)
    before = cut_of(model)
    if before is not None:
        if (before.num_stages, before.num_chunks) != (num_stages, num_chunks):
            chunks = f" of {before.num_chunks} chunks" if before.num_chunks > 1 else ""
            raise ConfigError(
                f"parallel.pipeline is {num_stages}, and the model was cut into {before.num_stages} stages{chunks} "
                "before; make it anew"
            )
        yield parameters
        return
    cut = BlockCut(model, num_stages, stage_id, _dtype_of(config), share, num_chunks, starts)
    model.__dict__[_ATTRIBUTE] = cut
    try:
        with _reduced(optimizer, cut) if isinstance(optimizer, torch.optim.Optimizer) else nullcontext():
            yield cut.own(parameters)
    except BaseException:
        cut.undo()
        raise
    cut.keep()
