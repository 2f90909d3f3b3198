# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's idioms beside an engine: zero_grad() of modules, p.grad, clipping, a foreign optimizer's step.

An engine takes each gradient as backward finishes it and leaves `.grad` None. Here programs that look at `.grad` find
it all the same, and those that drop it drop what the engine has. Nothing here runs while an engine is used as such.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deeptide import utils
from deeptide._C import ConfigError, TakenGradient
from deeptide._engine.cut_models import is_cut
from deeptide._process.reports import told

if TYPE_CHECKING:
    from types import FrameType

    from deeptide.engine import Engine

_plain: Any = torch.Tensor.grad  # C's descriptor
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_cut: weakref.WeakSet[Engine] = weakref.WeakSet()  # those with a part of each model's gradients

# Code of torch's that reads `.grad` to use it. Other code of torch's copies or moves whatever is there.
_READERS = ("torch.nn.utils.clip_grad", "torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")
_NOT_PROGRAMS = ("torch", "deeptide", "copy", "pickle")
_INSTEAD = 'clip by "gradient_clipping" in the configuration, and read engine.get_global_grad_norm() after step()'


def follow(engine: Engine) -> None:
    """From now on torch's idioms know this engine, if it trains."""
    if engine.optimizer is None:
        return
    _install()
    _engines.add(engine)
    if is_cut(engine):
        _cut.add(engine)


@functools.cache
def _install() -> None:
    """Once, and for good: other threads use these meanwhile. Parameters of no engine take torch's own way."""
    torch.nn.Parameter.grad = property(_get, _set, _delete, "The gradient.")  # type: ignore[assignment, misc, unused-ignore]
    for kind in (torch.nn.Module, torch.optim.Optimizer):
        kind.zero_grad = _dropping(kind.zero_grad)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_before_foreign_step)  # type: ignore[no-untyped-call, unused-ignore]


@told
def show_gradients(engine: Engine) -> None:
    """Until the next backward or step, `.grad` holds whole gradients. Collective, with ranks that are in step()."""
    engine._core.show_gradients()


@told
def drop_gradients(engine: Engine, of: list[torch.Tensor]) -> None:
    """Drops what these parameters got since the last step. Collective where this rank has any."""
    if engine._core.drop_gradients(of) and (loop := vars(engine).get("_loop")) is not None:
        loop.forget()  # a pipeline's forwards, whose backward is due


# -- p.grad -----------------------------------------------------------------------------------------------------


def _get(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient: torch.Tensor | None = _plain.__get__(parameter)
    if gradient is None:
        return _look(parameter) if _engines else None
    if _cut:
        _check_norm(parameter, sys._getframe(1))
    return gradient


def _set(parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
    if value is None and _engines:
        _drop_one(parameter, sys._getframe(1))
    _plain.__set__(parameter, value)


def _delete(parameter: torch.nn.Parameter) -> None:
    if _engines:
        _drop_one(parameter, sys._getframe(1))
    _plain.__set__(parameter, None)


def _taken(parameter: torch.nn.Parameter) -> tuple[Engine, TakenGradient] | None:
    """The engine that has this parameter's gradient, and whether it can show it; None if none has one."""
    engine = utils.engine_of(parameter)
    if engine is None or engine not in _engines or engine.is_destroyed:
        return None
    taken = engine._core.taken_gradient(parameter)
    return None if taken == TakenGradient.none else (engine, taken)


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _look(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """`.grad` of a parameter that has none, for the caller of the property."""
    found = _taken(parameter)
    if found is None:
        return None
    engine, taken = found
    frame = sys._getframe(2)
    name = _name_of(frame)
    reads = name in _READERS
    if not reads and _is_in(name, _NOT_PROGRAMS):
        return None
    if reads:
        _check_norm(parameter, frame)
    if taken == TakenGradient.showable:
        show_gradients(engine)
        shown: torch.Tensor | None = _plain.__get__(parameter)
        return shown
    text = f"p.grad is None, since the engine has the gradient: {engine._core.why_hidden()}"
    if reads:
        raise ConfigError(f"{_function_of(frame)}: {text}. Else {_INSTEAD}")
    engine._say_once(f"{text}. Else {_INSTEAD}", "warning")
    return None


def _function_of(frame: FrameType) -> str:
    """The function of torch's whose code reads `.grad`, as the program called it."""
    name, function = _name_of(frame), frame.f_code.co_name
    back: FrameType | None = frame
    while back is not None and _name_of(back) == name:
        if not back.f_code.co_name.startswith(("_", "<")):
            function = back.f_code.co_name
        back = back.f_back
    return function


def _check_norm(parameter: torch.nn.Parameter, frame: FrameType) -> None:
    """Errors: ConfigError where torch is about to compute a norm of a part of the model's gradients."""
    if _name_of(frame) not in _READERS:
        return
    engine = utils.engine_of(parameter)
    if engine is None or engine not in _cut or (function := _function_of(frame)) == "clip_grad_value_":
        return
    raise ConfigError(
        f"{function}: this rank has a part of the model, {engine.mesh}, and would see the norm of that alone; "
        f"{_INSTEAD}"
    )


# -- zero_grad ---------------------------------------------------------------------------------------------------


def _dropping(plain: Any) -> Any:
    @functools.wraps(plain)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        plain(self, set_to_none)
        if _engines:
            _drop(_parameters_of(self))

    return zero_grad


def _parameters_of(owner: torch.nn.Module | torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return (parameter for group in owner.param_groups for parameter in group["params"])


def _drop(parameters: Iterable[torch.Tensor]) -> None:
    """Drops what engines have of these parameters' gradients. Collective where there is any.

    Asks no other engine: another thread's may be waiting for this thread, with what an answer needs.
    """
    by_engine: dict[int, tuple[Engine, list[torch.Tensor]]] = {}
    for parameter in parameters:
        engine = utils.engine_of(parameter)
        if engine is not None and engine in _engines and not engine.is_destroyed:
            by_engine.setdefault(id(engine), (engine, []))[1].append(parameter)
    for engine, own in by_engine.values():
        if engine._core.has_gradients():
            drop_gradients(engine, own)


def _drop_one(parameter: torch.nn.Parameter, caller: FrameType) -> None:
    """Before `p.grad = None`, which programs write parameter by parameter: what can be shown is, and goes then."""
    found = _taken(parameter)
    if found is None or _is_in(_name_of(caller), _NOT_PROGRAMS):
        return
    engine, taken = found
    _plain.__set__(parameter, None)  # set by hand: with it gone, nobody doubts what is to be shown
    if taken == TakenGradient.showable:
        show_gradients(engine)
    else:
        drop_gradients(engine, [parameter])


# -- optimizers beside the engine ----------------------------------------------------------------------------------


def _before_foreign_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    known: dict[int, set[int]] = {}  # by engine: the ids of what it trains
    for parameter in _parameters_of(optimizer) if _engines else ():
        engine = utils.engine_of(parameter)
        if engine is None or engine not in _engines or engine.is_destroyed or engine.optimizer is None:
            continue
        if engine.optimizer is optimizer or engine.optimizer.plan.custom is not None:
            return  # the engine's own step, or what it may call
        if id(engine) not in known:
            known[id(engine)] = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        if id(parameter) in known[id(engine)]:
            _speak_of(optimizer, engine)
            return


def _speak_of(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    name = type(optimizer).__name__
    if engine._core.has_gradients():
        raise ConfigError(
            f"{name}.step(): the engine trains these parameters and has their gradients, so that this optimizer steps "
            f"none, or steps beside the engine's. Call engine.step() in its place; to have {name} step, give it to "
            "initialize(optimizer=…)"
        )
    engine._say_once(
        f"{name}.step() has nothing to do: the engine trains these parameters, and engine.step() has used their "
        "gradients. Leave it out; give the optimizer to initialize(optimizer=…) to have it step",
        "warning",
    )
