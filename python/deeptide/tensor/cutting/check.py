# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One small forward of a model before and after its layers are cut; also a backward where positions are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deeptide._C import CommError, ConfigError
from deeptide._process.log import say
from deeptide.tensor.cutting.examples import Example, examples_of, waves
from deeptide.tensor.cutting.slices import adding_names
from deeptide.tensor.team import Team

_MISFIT = (
    "a layer is used in another way than its name says. Name the layers to cut in tensor_parallel.partition_config"
)


_Result = TypeVar("_Result")


class Trial(NamedTuple):
    """One forward. `draws`: numbers of torch's generator, which it was given anew. `gradients`: by name."""

    inputs: Example
    outputs: list[torch.Tensor]
    draws: bool
    gradients: dict[str, torch.Tensor]


def try_whole(model: nn.Module, example: Example | None, team: Team, names: Sequence[str] = ()) -> Trial | None:
    """Runs the model with the caller's example, or with the first one of `examples_of` that it takes; None: with none.

    All ranks take the first rank's choice. names: of parameters whose gradients are wanted. Errors: the model's own.
    """
    found = _try_forward(model, example, team)
    if found is None or not names:
        return found
    return found._replace(gradients=_gradients_of(model, found, names))


def _try_forward(model: nn.Module, example: Example | None, team: Team) -> Trial | None:
    if example is not None:
        return _trial(model, example)
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
        self.maybe |= torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is an attention without dropout, which has the tag too."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _trial(model: nn.Module, inputs: Example) -> Trial:
    before = torch.get_rng_state()
    with _Draws() as draws:  # type: ignore[no-untyped-call]
        outputs = outputs_of(model, inputs)
    if not draws.maybe or torch.equal(before, torch.get_rng_state()):
        return Trial(inputs, outputs, False, {})
    torch.set_rng_state(before)
    return Trial(inputs, outputs_of(model, inputs, draws=True), True, {})


@contextmanager
def _evaluated(model: nn.Module, draws: bool) -> Iterator[None]:
    """In evaluation mode. draws: the same numbers each time."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=(), enabled=draws):
            if draws:
                torch.default_generator.manual_seed(0)
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


def _gradients_of(model: nn.Module, trial: Trial, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Gradients of some parameters for gradients of the outputs that repeat nowhere; no others are computed."""
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        for parameter in wanted:
            parameter.requires_grad_(True)
        with _evaluated(model, trial.draws), torch.enable_grad():
            outputs = [output for output in _floats(model(**trial.inputs)) if output.requires_grad]
        given = [waves(*output.shape).to(output.device) for output in outputs]
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True) if outputs else [None] * len(wanted)
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
    return {name: gradient.float() for name, gradient in zip(names, found, strict=True) if gradient is not None}


def compare(model: nn.Module, whole: Trial, team: Team) -> None:
    """Errors: ConfigError if the model, cut now, cannot run or computes something else than the whole one did."""
    cut, dtype = _of_cut(lambda: outputs_of(model, whole.inputs, whole.draws)), next(model.parameters()).dtype
    share = 64 * torch.finfo(dtype).eps  # of the largest output: sums are taken in parts, each rounded, in every layer
    for number, (before, after) in enumerate(zip(whole.outputs, cut, strict=True)):
        largest = before.abs().max().item() if before.numel() else 0.0
        differs = before.shape != after.shape
        most = float("inf") if differs else (before - after).abs().max().item() if before.numel() else 0.0
        if differs or not most <= share * max(largest, 1e-3):
            raise ConfigError(
                f"output {number} of the model whose layers are cut differs by up to {most:.3g} from that of the whole "
                f"model, whose largest value is {largest:.3g}: {_MISFIT}, or set parallel.tensor_check to false if the "
                "model draws random numbers in evaluation mode"
            )

    if whole.gradients:
        _compare_gradients(model, whole, team, torch.finfo(dtype).eps)


def _compare_gradients(model: nn.Module, whole: Trial, team: Team, eps: float) -> None:
    """A sum over the ranks that is missing, or one too many, changes a gradient by as much as it has."""
    names = list(whole.gradients)
    cut, adding = _of_cut(lambda: _gradients_of(model, whole, names)), set(adding_names(model))
    least = 1e-2 * max(gradient.abs().max().item() for gradient in whole.gradients.values())
    for name, before in whole.gradients.items():
        after = cut[name] if name in cut else torch.zeros_like(before)
        after = team.core.all_reduce(after, "start") if name in adding else after
        most, largest = (before - after).abs().max().item(), before.abs().max().item()
        if not most <= max(1e-3, 16 * eps) * max(largest, least):
            raise ConfigError(
                f"the gradient of '{name}' in the model whose layers are cut differs by up to {most:.3g} from that in "
                f"the whole model, whose largest value is {largest:.3g}: a layer uses positions in another way than "
                "its kind says; leave parallel.sequence_parallel_norms out"
            )


def _of_cut(compute: Callable[[], _Result]) -> _Result:
    try:
        return compute()
    except Exception as error:  # the model may raise what it likes
        if isinstance(error, CommError):
            raise
        raise ConfigError(
            f"the model whose layers are cut cannot run, and the whole one can ({_first_line(error)}): {_MISFIT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def tell_unchecked(model: nn.Module) -> None:
    """Says that no input is known."""
    say(
        f"tensor: {type(model).__name__} is not compared with the whole model, since its inputs are not known: give "
        "split_model an example before initialize"
    )
