# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One small forward and backward of a model before and after its layers are cut: outputs and all gradients agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from deeptide._C import CommError, ConfigError
from deeptide._model.changes import Structure
from deeptide._process import generators
from deeptide._process.log import say
from deeptide.pipeline.passing.draws import may_draw
from deeptide.pipeline.step.undo import Buffers
from deeptide.tensor.cutting.examples import Example, examples_of
from deeptide.tensor.cutting.gradients import Digests, Verdict, aliased, compare_gradients, fits_in_fp32, gradients_of
from deeptide.tensor.cutting.perturbed import Perturbed
from deeptide.tensor.cutting.slices import Slice, add_up, adding_names, slices_of
from deeptide.tensor.team import Team

_MISFIT = (
    "a layer is used in another way than its name says. Name the layers to cut in tensor_parallel.partition_config"
)

_REPLACED = (
    "the forward of {} put another module in the place of '{}' when it ran on the start's example, as BigBird does for "
    "short inputs: give split_model an example as long as the program's, choose the other form in the model's "
    'configuration (BigBird: attention_type "original_full"), or set parallel.tensor_check to false'
)

_Result = TypeVar("_Result")


class Trial(NamedTuple):
    """One run. `draws`: of torch's generator, which it was given anew. `gradients`: None where none is known.

    in_fp32: the model, which has 16 bits, ran with a copy of its parameters.
    """

    inputs: Example
    outputs: list[torch.Tensor]
    draws: bool
    gradients: Digests | None
    in_fp32: bool = False


class Checked:
    """A whole model whose weights are perturbed, and what it computes with them. Errors: its own, with an example."""

    def __init__(self, model: nn.Module, example: Example | None, team: Team) -> None:
        self._model, self._team = model, team
        self._slices: Mapping[int, Slice] = {}
        self._buffers = Buffers(model)
        self._perturbed = Perturbed(model)
        structure = Structure(model)
        try:
            self.whole = try_whole(model, example, team)
            if replaced := structure.restore():
                raise ConfigError(_REPLACED.format(type(model).__name__, replaced))
            if self.whole is not None and team.any(not _is_finite(self.whole.outputs)):
                self._restore()
                self.whole = try_whole(model, example, team)
        except BaseException:
            self._restore()
            raise

    def take_gradients(self, slices: Mapping[int, Slice]) -> None:
        """Adds the gradients, of parameters that are to be cut this rank's parts. slices: by a parameter's id."""
        self._slices = slices
        if self.whole is not None:
            self.whole = with_gradients(self._model, self.whole, slices, self._team)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Inside, the model computes as `whole` did: in evaluation mode, with the same numbers where it draws any."""
        with _evaluated(self._model, self.whole is not None and self.whole.draws):
            yield

    def _restore(self) -> None:
        self._perturbed.restore(self._slices, self._team)
        self._buffers.restore()

    @contextmanager
    def weights_come_back(self) -> Iterator[None]:
        """Around the cutting of the model and the comparison."""
        try:
            yield
        finally:
            self._restore()


def _is_finite(outputs: list[torch.Tensor]) -> bool:
    return all(bool(output.isfinite().all()) for output in outputs)


def with_gradients(model: nn.Module, whole: Trial, slices: Mapping[int, Slice], team: Team) -> Trial:
    """The trial with gradients, or without any, which is told of, where the model has no backward."""
    by_name = {name: slices[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in slices}

    def cut(name: str, gradient: torch.Tensor) -> torch.Tensor:
        return by_name[name].cut(gradient, team) if name in by_name else gradient

    why = ""
    for in_fp32 in (True, False) if fits_in_fp32(model) else (False,):
        try:
            found = whole._replace(in_fp32=in_fp32)
            outputs, gradients = _run(model, found, cut)
            found, why = found._replace(outputs=outputs, gradients=gradients), ""
        except Exception as error:  # some models have no backward in evaluation mode, or want one type
            found, why = whole, _first_line(error)
        if not team.any(bool(why)):
            return found
    if team.index == team.data_rank == 0:
        say(f"tensor: gradients of {type(model).__name__} are not compared with the whole model's: {why}")
    return whole


def try_whole(model: nn.Module, example: Example | None, team: Team) -> Trial | None:
    """Runs the model with the caller's example, or with the first one of `examples_of` that it takes; None: with none.

    All ranks take the first rank's choice. Errors: the model's own.
    """
    if example is not None:
        return _trial_of_given(model, example)
    chosen, found = -1, None
    for number, inputs in enumerate(examples_of(model, team.size)):
        try:
            chosen, found = number, _trial(model, inputs)
        except Exception:  # the inputs are a guess, and the model raises what it likes
            continue
        break
    agreed = torch.tensor([chosen if found else -1])
    team.core.broadcast(agreed, "start")
    first = int(agreed)
    if found is not None and first == chosen:
        return found
    return _trial(model, list(examples_of(model, team.size))[first]) if first >= 0 else None


class _Draws(TorchDispatchMode):
    """Notes whether an operator of this thread may draw: ranks that are threads share one generator."""

    maybe = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.maybe |= may_draw(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _trial(model: nn.Module, inputs: Example) -> Trial:
    before, interpreter = torch.get_rng_state(), generators.of_interpreter()
    with _Draws() as draws:  # type: ignore[no-untyped-call]
        outputs = outputs_of(model, inputs)
    in_torch = draws.maybe and not torch.equal(before, torch.get_rng_state())
    in_interpreter = interpreter != generators.of_interpreter()
    if in_torch:  # not where another thread alone drew, whose numbers would come twice
        torch.set_rng_state(before)
    if in_interpreter:
        generators.set_interpreter(interpreter)
    drew = in_torch or in_interpreter
    return Trial(inputs, outputs_of(model, inputs, draws=True) if drew else outputs, drew, None)


def _trial_of_given(model: nn.Module, example: Example) -> Trial:
    """With the caller's example as it is, or, where the model does not take that, with its numbers in the model's type.

    Errors: the model's own for the example as it is.
    """
    first = next((each for each in model.parameters() if each.is_floating_point()), None)
    try:
        return _trial(model, example)
    except Exception:
        floats = {
            key: value
            for key, value in example.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        if first is None or all(value.dtype == first.dtype for value in floats.values()):
            raise
        with suppress(Exception):
            return _trial(model, {**example, **{key: value.to(first.dtype) for key, value in floats.items()}})
        raise


@contextmanager
def _evaluated(model: nn.Module, draws: bool) -> Iterator[None]:
    """In evaluation mode. draws: the same numbers each time."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with generators.alike() if draws else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _floats(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        result = [result]
    values = result.values() if isinstance(result, dict) else result
    return [value.float() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def outputs_of(model: nn.Module, inputs: Example, draws: bool = False) -> list[torch.Tensor]:
    """The floating tensors that the model returns, in evaluation mode, in fp32. draws: the same numbers each time."""
    with _evaluated(model, draws), torch.no_grad():
        return _floats(model(**inputs))


def _run(
    model: nn.Module, trial: Trial, cut: Callable[[str, torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], Digests]:
    """The outputs, and digests of all parameters' gradients."""
    inputs = trial.inputs
    if trial.in_fp32:
        inputs = tree_map_only(torch.Tensor, lambda each: each.float() if each.is_floating_point() else each, inputs)
    with aliased(model, trial.in_fp32) as parameters:
        with _evaluated(model, trial.draws), torch.enable_grad():
            outputs = _floats(model(**inputs))
        gradients = gradients_of(outputs, parameters, cut) if parameters else {}
    return [output.detach() for output in outputs], gradients


def compare(model: nn.Module, whole: Trial, team: Team, suspect: str = "") -> None:
    """Lets partial gradients of whole parameters add up where that gives the whole model's.

    suspect: why it may not run. Errors: ConfigError if the model, cut now, cannot run or computes something else.
    """
    gradients: Digests | None = None
    if whole.gradients is None:
        outputs = _of_cut(lambda: outputs_of(model, whole.inputs, whole.draws), suspect)
    else:
        outputs, gradients = _of_cut(lambda: _run(model, whole, lambda _, gradient: gradient), suspect)
    verdicts: list[Verdict] = []
    if whole.gradients is not None and gradients is not None:
        verdicts = compare_gradients(whole.gradients, gradients, dict(slices_of(model)), team)
    eps = torch.finfo(torch.float32 if whole.in_fp32 else next(model.parameters()).dtype).eps
    _compare_outputs(whole.outputs, outputs, 64 * eps, [verdict.name for verdict in verdicts if verdict.is_absent])
    adding = set(adding_names(model))
    for verdict in verdicts:
        _judge(model, verdict, verdict.name in adding, max(1e-3, 32 * eps), team)


def _compare_outputs(whole: list[torch.Tensor], cut: list[torch.Tensor], share: float, absent: list[str]) -> None:
    """share: of the largest output, since sums are taken in parts, each rounded, in every layer."""
    for number, (before, after) in enumerate(zip(whole, cut, strict=True)):
        largest = before.abs().max().item() if before.numel() else 0.0
        differs = before.shape != after.shape
        most = float("inf") if differs else (before - after).abs().max().item() if before.numel() else 0.0
        if differs or not most <= share * max(largest, 1e-3):
            unused = f"; no rank uses '{absent[0]}'" if absent else ""
            raise ConfigError(
                f"output {number} of the model whose layers are cut differs by up to {most:.3g} from that of the whole "
                f"model, whose largest value is {largest:.3g}{unused}: {_MISFIT}, or set parallel.tensor_check to "
                "false if the model draws random numbers in evaluation mode"
            )


def _judge(model: nn.Module, verdict: Verdict, adds_up: bool, most: float, team: Team) -> None:
    """A rank that has a part of the features or positions has a part of the gradient of what is whole there."""
    if (verdict.sum_off if adds_up else verdict.off) <= most:
        return
    if not adds_up and verdict.sum_off <= most:
        add_up(model, verdict.name, team)
        return
    off = min(verdict.off, verdict.sum_off)
    size = "" if math.isinf(off) else f" by {off:.1%} of its size"
    raise ConfigError(
        f"the gradient of '{verdict.name}' in the model whose layers are cut differs{size} from that in the whole "
        f'model, and so does the sum of the ranks\' gradients: {_MISFIT}, or leave those around it whole by "skip" '
        "there; if parallel.sequence_parallel_norms is on, leave it out"
    )


def _of_cut(compute: Callable[[], _Result], suspect: str) -> _Result:
    try:
        return compute()
    except Exception as error:  # the model may raise what it likes
        if isinstance(error, CommError):
            raise
        why = f"{suspect}, or " if suspect else ""
        raise ConfigError(
            f"the model whose layers are cut cannot run, and the whole one can ({_first_line(error)}): {why}{_MISFIT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def refuse_unchecked(model: nn.Module) -> None:
    """Errors: ConfigError: layers were found by names, and no input is known by which that could be checked."""
    raise ConfigError(
        f"tensor: the layers of {type(model).__name__} are found by their names, and its inputs are not known, so that "
        "nothing shows whether ranks may share them: call deeptide.tensor.split_model(model, team, example={…}) before "
        "initialize, name the layers in tensor_parallel.partition_config, or set parallel.tensor_check to false"
    )


def tell_unchecked(model: nn.Module) -> None:
    """Says that no input is known."""
    say(
        f"tensor: {type(model).__name__} is not compared with the whole model, since its inputs are not known: give "
        "split_model an example before initialize"
    )
