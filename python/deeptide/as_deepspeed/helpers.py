# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Small functions of DeepSpeed's that libraries and scripts call."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from deeptide._log import say
from deeptide.accelerator import get_accelerator

_F = TypeVar("_F", bound=Callable[..., Any])


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested containers whose tensors have memory of their own: torch.save writes no more than them."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone().to(device), item)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the memory in use, if forced to, as DeepSpeed does."""
    if not force:
        return
    accelerator = get_accelerator()
    gib = 1 << 30
    say(
        f"{message}: {accelerator.memory_allocated() / gib:.2f} GiB in use, at most "
        f"{accelerator.max_memory_allocated() / gib:.2f}; {accelerator.available_memory() / gib:.2f} GiB of "
        f"{accelerator.total_memory() / gib:.2f} free"
    )


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Nested containers whose tensors are on a device: those for which the criterion holds, if there is one."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor,
        item,
    )


def empty_cache() -> None:
    """Gives unused memory of the device back."""
    get_accelerator().empty_cache()


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """A call as text: name(1, key=2)."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def noop_decorator(func: _F) -> _F:
    """The function itself."""
    return func


def instrument_w_nvtx(func: _F) -> _F:
    """The function itself."""
    return func


def disable_compile(func: _F) -> _F:
    """Keeps torch's compiler out of a function."""
    return torch.compiler.disable(func)  # type: ignore[no-any-return, unused-ignore]


def is_compile_supported() -> bool:
    """True: torch has it."""
    return True


def recursive_getattr(model: torch.nn.Module, module_name: str) -> Any:
    """The attribute at a dotted path."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: torch.nn.Module, module_name: str, module: Any) -> None:
    """Sets it."""
    *path, last = module_name.split(".")
    setattr(functools.reduce(getattr, path, model), last, module)


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether ranks hold different ones: none do."""
    return False


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    """(False, 0): expert parallelism is not here."""
    return False, 0


# -- leaf modules: DeepSpeed must be told where ranks may take different branches; here they just may ---------------


@functools.cache
def _say_leaves() -> None:
    say("set_z3_leaf_modules has nothing to do: ranks may take different branches at every stage")


def _matching(model: torch.nn.Module, leaves: Iterable[Any]) -> list[torch.nn.Module]:
    leaves = list(leaves)
    return [
        module
        for module in model.modules()
        if any(leaf == type(module).__name__ if isinstance(leaf, str) else isinstance(module, leaf) for leaf in leaves)
    ]


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Says that nothing has to be done; returns the modules of these classes. Errors: ValueError if there are none."""
    found = _matching(model, leaf_module_classes)
    if not found and raise_if_not_found:
        raise ValueError(f"no modules of these classes in {type(model).__name__}: {list(leaf_module_classes)}")
    for module in found:
        module.__dict__["_z3_leaf"] = True
    _say_leaves()
    return found


def unset_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Iterable[Any]) -> list[torch.nn.Module]:
    """Takes it back."""
    found = _matching(model, leaf_module_classes)
    for module in found:
        module.__dict__["_z3_leaf"] = False
    return found


def set_z3_leaf_module(module: torch.nn.Module, flag: bool) -> None:
    """Of one module."""
    module.__dict__["_z3_leaf"] = flag


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that were set."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: torch.nn.Module) -> bool:
    """Whether it was set."""
    return bool(module.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(param: torch.Tensor) -> bool:
    """False: parameters are not marked."""
    return False
