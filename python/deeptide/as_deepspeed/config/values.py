# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of deepspeed.runtime.config that read one key of a configuration, with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deeptide._C import ConfigError


def value_at(config: dict[str, Any], path: str, default: Any) -> Any:
    """The value at "a.b" of nested dictionaries, or the default."""
    at: Any = config
    for key in path.split("."):
        at = at.get(key) if isinstance(at, dict) else None
    return default if at is None else at


# Function: key, default.
_KEYS: dict[str, tuple[str, Any]] = {
    "get_dataloader_drop_last": ("dataloader_drop_last", False),
    "get_dump_state": ("dump_state", False),
    "get_gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "get_gradient_clipping": ("gradient_clipping", 1.0),
    "get_gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "get_log_level": ("log_level", None),
    "get_memory_breakdown": ("memory_breakdown", False),
    "get_prescale_gradients": ("prescale_gradients", False),
    "get_steps_per_print": ("steps_per_print", None),
    "get_train_batch_size": ("train_batch_size", None),
    "get_train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", None),
    "get_wall_clock_breakdown": ("wall_clock_breakdown", False),
    "get_zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "get_zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
}
# Function: section, key.
_OF_SECTIONS = {
    "get_optimizer_name": ("optimizer", "type"),
    "get_optimizer_params": ("optimizer", "params"),
    "get_scheduler_name": ("scheduler", "type"),
    "get_scheduler_params": ("scheduler", "params"),
}
NAMES = sorted([*_KEYS, *_OF_SECTIONS])


def _reader(name: str) -> Callable[[dict[str, Any]], Any]:
    def read(param_dict: dict[str, Any]) -> Any:
        if name in _KEYS:
            return param_dict.get(*_KEYS[name])
        section, key = _OF_SECTIONS[name]
        return (param_dict.get(section) or {}).get(key)

    read.__name__ = read.__qualname__ = name
    read.__doc__ = f"{'.'.join(_OF_SECTIONS[name]) if name in _OF_SECTIONS else _KEYS[name][0]} of a configuration."
    return read


globals().update({name: _reader(name) for name in NAMES})


def get_communication_data_type(
    param_dict: dict[str, Any], comm_type: str = "communication_data_type", comm_data_type_default: str | None = None
) -> torch.dtype | None:
    """The type that a key names; None for the parameters' own. Errors: ValueError for another word."""
    word = param_dict.get(comm_type, comm_data_type_default)
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if word is None or word.lower() in types:
        return None if word is None else types[word.lower()]
    raise ValueError(f"{comm_type}: got {word!r}, expected one of {', '.join(types)}")


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    """param_dict[param_name], or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json.load's object_pairs_hook. Errors: ConfigError, a ValueError, naming keys that stand twice."""
    keys = [key for key, _ in ordered_pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"the configuration has these keys more than once: {', '.join(twice)}")
    return dict(ordered_pairs)
