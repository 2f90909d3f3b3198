# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One small forward of a model before and after its layers are cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deeptide._C import CommError, ConfigError
from deeptide._process.log import say
from deeptide.tensor.cutting.examples import Example, examples_of
from deeptide.tensor.team import Team

_MISFIT = (
    "a layer is used in another way than its name says. Name the layers to cut in tensor_parallel.partition_config"
)


class Trial(NamedTuple):
    """One forward. `draws`: numbers of torch's generator, which it was given anew."""

    inputs: Example
    outputs: list[torch.Tensor]
    draws: bool


def try_whole(model: nn.Module, example: Example | None, team: Team) -> Trial | None:
    """Runs the model with the caller's example, or with the first one of `examples_of` that it takes; None: with none.

    All ranks take the first rank's choice. Errors: the model's own.
    """
    if example is not None:
        return _trial(model, example)
    chosen, found = -1, None
    for number, inputs in enumerate(examples_of(model)):
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
    return _trial(model, list(examples_of(model))[first]) if first >= 0 else None


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
        return Trial(inputs, outputs, False)
    torch.set_rng_state(before)
    return Trial(inputs, outputs_of(model, inputs, draws=True), True)


def outputs_of(model: nn.Module, inputs: Example, draws: bool = False) -> list[torch.Tensor]:
    """The floating tensors that the model returns, in evaluation mode, in fp32. draws: the same numbers each time."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=(), enabled=draws):
            if draws:
                torch.default_generator.manual_seed(0)
            result = model(**inputs)
    finally:
        for module, training in modes:
            module.training = training
    if isinstance(result, torch.Tensor):
        result = [result]
    values = result.values() if isinstance(result, dict) else result
    return [value.float() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def compare(model: nn.Module, whole: Trial) -> None:
    """Errors: ConfigError if the model, cut now, cannot run or computes something else than the whole one did."""
    cut, dtype = _outputs_of_cut(model, whole), next(model.parameters()).dtype
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


def _outputs_of_cut(model: nn.Module, whole: Trial) -> list[torch.Tensor]:
    try:
        return outputs_of(model, whole.inputs, whole.draws)
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
