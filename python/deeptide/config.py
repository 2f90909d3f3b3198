# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Turns what a caller gives (path, dict, base64, args) into a validated Config."""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import os
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from deeptide import _C
from deeptide._C import Config, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ConfigSource: TypeAlias = str | os.PathLike[str] | dict[str, Any] | Config
_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST_NESTED = 16  # levels that are looked into: a dict may hold itself


def _from_args(args: object) -> ConfigSource | None:
    """The configuration that the command line names, if any."""
    given = getattr(args, "deepspeed_config", None)
    old = getattr(args, "deepscale_config", None)
    if given is not None and old is not None:
        raise ConfigError(
            "args holds both deepspeed_config and its old spelling deepscale_config; give deepspeed_config alone"
        )
    return given if given is not None else old


def _why_not_json(key: str, value: object, depth: int = 0) -> str | None:
    """Names the part of a value that JSON cannot hold, by its dotted key; None: it can hold all of it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"config key {key!r}: got {value}, expected a finite number"
    inner: Iterable[tuple[Any, Any]] = ()
    if depth < _MOST_NESTED:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        if text := _why_not_json(f"{key}.{name}", part, depth + 1):
            return text
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"config key {key!r}: {error}; expected what JSON can hold"
    return None


def _from_dict(config: dict[str, Any]) -> Config:
    for key, value in config.items():
        if text := _why_not_json(key, value):
            raise ConfigError(text)
    return Config.from_text(json.dumps(config), "<dict>")


def _from_string(config: str) -> Config:
    if os.path.exists(config):
        return Config.from_file(config)
    try:
        text = base64.urlsafe_b64decode(config).decode("utf-8")
        json.loads(text)
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"config: got {config!r}, expected the path of an existing file, a dict or a base64 string of JSON; "
            f"there is no such file (working directory: {os.getcwd()})"
        ) from None
    return Config.from_text(text, "<base64>")


def without_own_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets a ConfigError leave `function` without the frames in it: the user's line and the message tell all."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise error.with_traceback(None) from error.__cause__

    return called


def load_config(
    config: ConfigSource | None = None, args: object = None, config_params: ConfigSource | None = None
) -> Config:
    """Returns the one configuration given: `config`, `config_params` (its old name) or args.deepspeed_config."""
    if config is not None and config_params is not None:
        raise ConfigError("both config and config_params (its old name) were given; give config alone")
    config = config if config is not None else config_params
    from_args = _from_args(args)
    if config is not None and from_args is not None:
        raise ConfigError(
            "Not sure how to proceed, we were given both a deepspeed_config (args: "
            f"{from_args!r}) and ds_config (config); give one of them"
        )
    config = config if config is not None else from_args
    if config is None:
        raise ConfigError("no configuration: give config= (a path, a dict, ...) or args.deepspeed_config")
    if isinstance(config, _C.Config):
        return config
    if isinstance(config, dict):
        return _from_dict(config)
    if isinstance(config, (str, os.PathLike)):
        return _from_string(os.fspath(config))
    raise ConfigError(
        f"config: got {type(config).__name__}, expected a path, a dict, a base64 string or a deeptide.Config"
    )
