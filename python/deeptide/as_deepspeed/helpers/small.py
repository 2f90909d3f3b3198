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

from deeptide._process.log import say
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


def parse_range_list(range_str: str) -> list[int]:
    """Numbers of a text: [0, 1, 2, 5] of "0-2,5". Errors: ValueError unless the numbers grow."""
    numbers: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
        if last and int(last) < int(first):
            raise ValueError(f"{range_str!r}: {part!r} ends before it begins")
    if sorted(set(numbers)) != numbers:
        raise ValueError(f"{range_str!r}: numbers must grow and stand once each")
    return numbers


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether ranks hold different ones: none do."""
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups as a list: no parameter is an expert's, so none is split."""
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"param_groups: got {type(param_groups).__name__}, expected a dict, a list or a tuple of them")
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Parameters as one group, or the groups as they are."""
    if model_parameters and isinstance(model_parameters[0], dict):
        return list(model_parameters)
    return [{"params": list(model_parameters), "name": "dense-params"}]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the gradients that there are, in fp32; those of experts: none)."""
    return [parameter.grad.float() for parameter in group if parameter.grad is not None], []


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
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
        if any(leaf in _names(module) if isinstance(leaf, str) else isinstance(module, leaf) for leaf in leaves)
    ]


def _names(module: torch.nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


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


def _set_named(
    model: torch.nn.Module, names: Iterable[str], flag: bool, must: bool, matches: Callable[[str, str], bool]
) -> tuple[list[torch.nn.Module], list[str]]:
    """Marks the modules whose names match; returns them and the names that match none."""
    found: dict[torch.nn.Module, None] = {}
    missing = []
    for wanted in names:
        here = [module for name, module in model.named_modules() if matches(name, wanted)]
        found.update(dict.fromkeys(here))
        missing += [] if here else [wanted]
    if missing and must:
        raise ValueError(f"no modules of these names in {type(model).__name__}: {missing}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return list(found), missing


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """By names of named_modules(); returns the modules and the names that are none. Errors: ValueError for those."""
    return _set_named(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """By the ends of names of named_modules(); else as set_z3_leaf_modules_by_name."""
    return _set_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Takes it back. Errors: ValueError if there are none of these classes."""
    found = _matching(model, leaf_module_classes)
    if not found and raise_if_not_found:
        raise ValueError(f"no modules of these classes in {type(model).__name__}: {list(leaf_module_classes)}")
    for module in found:
        module.__dict__["_z3_leaf"] = False
    return found


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Does so for one module."""
    model.__dict__["_z3_leaf"] = flag


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that were set."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether it was set."""
    return bool(model.__dict__.get("_z3_leaf", False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """False: parameters are not marked."""
    return False
