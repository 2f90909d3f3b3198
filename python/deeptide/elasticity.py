# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's elasticity functions: the batch that suits many numbers of ranks, planned outside of a training."""

from __future__ import annotations

import json
import os
from typing import Any

from deeptide import _C
from deeptide._C import Config, ConfigError

_OLDEST = (0, 3, 8)  # DeepSpeed's first version with elasticity


class ElasticityError(ConfigError):
    """Anything that keeps elasticity from being computed."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, off, or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818  DeepSpeed's name
    """The number of ranks is not a valid one."""


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Whether the configuration, a dict, turns elasticity on."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def _parsed(section: dict[str, Any]) -> Config:
    try:
        return Config.from_text(json.dumps({"elasticity": section}), "<elasticity>")
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Errors: ElasticityConfigError if DEEPSPEED_ELASTICITY_CONFIG, the scheduler's section, says something else."""
    _parsed({**runtime_elastic_config_dict, "enabled": True})


def _check_version(version: str) -> None:
    try:
        numbers = tuple(int(part) for part in str(version).split("+")[0].split(".")[:3])
    except ValueError:
        raise ElasticityError(f"target_deepspeed_version: got {version!r}, expected a version as 0.16.4") from None
    if numbers < _OLDEST:
        raise ElasticityError(f"target_deepspeed_version: got {version}, elasticity came with 0.3.8")


def _world_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 0


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str = "0.19.7",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The elastic global batch and the numbers of ranks that suit it; with a world size, the micro-batch too.

    Returns (final_batch_size, valid_gpus) or, given world_size or return_microbatch, with micro_batch_size. Without
    world_size, version 0.2 and return_microbatch take WORLD_SIZE from the environment.
    """
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config: got {type(ds_config).__name__}, expected a dict")
    if "elasticity" not in ds_config:
        raise ElasticityConfigError("'elasticity' is missing from the configuration; add it for an elastic job")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("elasticity.enabled is not true; set it for an elastic job")
    _check_version(target_deepspeed_version)
    config = _parsed(ds_config["elasticity"])
    current = world_size if world_size > 0 else _world_of_environment()
    try:
        train, valid, micro, preferred, version = _C.elastic_batch(config, current)
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from error
    if world_size <= 0 and not return_microbatch:
        return train, valid
    if world_size <= 0 and version == 0.2:
        return train, valid, preferred
    if current <= 0:
        raise ElasticityConfigError("the micro-batch depends on the number of ranks; give world_size or set WORLD_SIZE")
    if current not in valid:
        raise ElasticityIncompatibleWorldSize(f"World size ({current}) is not valid; use one of {valid}")
    return train, valid, micro
