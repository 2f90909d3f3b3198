# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations as libraries and scripts hand them to DeepSpeed: translated for Deeptide, each change told."""

from __future__ import annotations

import base64
import copy
import enum
import functools
import json
import math
import os
import re
from typing import Any

import torch

from deeptide import _C
from deeptide._C import Config, ConfigError
from deeptide._process.log import say
from deeptide.as_deepspeed.config.values import dict_raise_error_on_duplicate_keys, value_at
from deeptide.as_deepspeed.names import surface
from deeptide.config import load_config

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
SGD_OPTIMIZER = "sgd"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER]
DEEPSPEED_OPTIMIZERS += [ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, MUON_OPTIMIZER]
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "adam_w_mode", True


_STRING = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|/\*.*?\*/|#[^\n]*", re.DOTALL)
_TRAILING = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


class ZeroStageEnum(enum.IntEnum):
    """Which tensors ZeRO shards."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class _TextEnum(str, enum.Enum):
    """Members that print and format as their values, as Python 3.11's enum.StrEnum has them."""

    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


class OffloadDeviceEnum(_TextEnum):
    """The places where states may lie."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(_TextEnum):
    """The states that engine.offload_states moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def as_dict(config: Any, args: object = None) -> dict[str, Any]:
    """The configuration as a dictionary of the caller's, whatever form it was given in."""
    if config is None:
        config = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    elif getattr(args, "deepspeed_config", None) is not None and getattr(args, "deepspeed_config", None) != config:
        load_config(config, args)  # which says that both were given
    if isinstance(config, dict):
        return config
    if isinstance(config, Config):
        return _parse(config.text, config.origin)
    if isinstance(config, (str, os.PathLike)):
        path = os.fspath(config)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return _parse(file.read(), path)
        try:
            return _parse(base64.urlsafe_b64decode(path).decode("utf-8"), "<base64>")
        except (ValueError, ConfigError):
            pass
    load_config(config, args)  # which says what is wrong with it
    raise ConfigError(f"config: got {type(config).__name__}, expected a path, a dict or a base64 string")


def _parse(text: str, origin: str) -> dict[str, Any]:
    """A text of JSON, with comments where there are some, as a dictionary."""
    try:
        value = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ConfigError:
        raise
    except ValueError:
        # With comments or trailing commas. What is no JSON even without them, the core names by its line.
        try:
            value = json.loads(
                _TRAILING.sub(lambda match: match[1] or "", _COMMENT.sub(lambda match: match[1] or " ", text)),
                object_pairs_hook=dict_raise_error_on_duplicate_keys,
            )
        except ConfigError:
            raise
        except ValueError:
            value = _hjson(text)
            value = Config.from_text(text, origin) and {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: expected an object of keys in braces")
    return value


def _hjson(text: str) -> Any:
    """The text as Hjson, which DeepSpeed reads, too; None without its package, or if it is none."""
    try:
        import hjson  # type: ignore[import-not-found, unused-ignore]

        return hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ConfigError):  # keys that are there twice
            raise
        return None


@functools.cache
def _schema() -> dict[str, Any]:
    properties: dict[str, Any] = json.loads(_C.config_json_schema())["properties"]
    return properties


def _set_dotted(config: dict[str, Any], key: str, value: Any) -> str:
    """Writes "a.b": value to config["a"]["b"]; returns what was done."""
    *sections, leaf = key.split(".")
    at = config
    for name in sections:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            return f"{key}: dropped, since {name} is no section"
    if isinstance(value, float) and math.isfinite(value) and value != int(value):
        value = int(value)
    at[leaf] = value
    return f"{key}: taken as {'.'.join(sections)}: {leaf} = {value}"


_BOOLEAN = {"boolean", "integer", "number"}


def _with_booleans(config: dict[str, Any], keys: dict[str, Any], section: str = "") -> list[str]:
    """Writes true and false where a configuration has 1 and 0 for them, as DeepSpeed reads them."""
    lines = []
    for key, value in config.items():
        forms = keys[key].get("anyOf", [keys[key]]) if isinstance(keys.get(key), dict) else []
        if isinstance(value, dict):
            inner: dict[str, Any] = next((form["properties"] for form in forms if "properties" in form), {})
            lines += _with_booleans(value, inner, f"{section}{key}.")
        elif type(value) is int and value in (0, 1) and {form.get("type") for form in forms} & _BOOLEAN == {"boolean"}:
            config[key] = bool(value)
            lines.append(f"{section}{key}: {value} taken as {str(bool(value)).lower()}")
    return lines


def _without_cpu_offload(config: dict[str, Any]) -> list[str]:
    """Takes offloading to the CPU out of a configuration for a machine whose model is there anyway."""
    lines = []
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        for name in ("offload_optimizer", "offload_param"):
            section = zero.get(name)
            if isinstance(section, dict) and section.get("device") == "cpu":
                del zero[name]
                lines.append(f"zero_optimization.{name}: dropped: without a GPU everything is in the CPU's memory")
    return lines


def _switch_on_around(config: dict[str, Any]) -> list[str]:
    """Sections of data_efficiency without "enabled" around one that is on: DeepSpeed reads the inner switch alone."""
    outer = config.get("data_efficiency")
    if not isinstance(outer, dict):
        return []
    lines = []
    for name, children in (
        ("data_sampling", ("curriculum_learning", "dynamic_batching")),
        ("data_routing", ("random_ltd",)),
    ):
        section = outer.get(name)
        inner = section if isinstance(section, dict) else {}
        if not any(isinstance(inner.get(child), dict) and inner[child].get("enabled") is True for child in children):
            continue
        for path, around in (("data_efficiency", outer), (f"data_efficiency.{name}", inner)):
            if "enabled" not in around:
                around["enabled"] = True
                lines.append(f"{path}.enabled: true, since a section in it is on")
    return lines


def translate(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a configuration that Deeptide reads, and a line for each change that this took."""
    config = copy.deepcopy(given)
    lines = []
    steps = config.get("steps_per_print")
    if isinstance(steps, float) and not math.isfinite(steps):
        del config["steps_per_print"]
        lines.append("steps_per_print: inf, so no progress lines")
    for key in [key for key in config if "." in key]:
        value = config.pop(key)
        if key.split(".")[0] in _schema():
            lines.append(_set_dotted(config, key, value))
        else:
            lines.append(f"{key}: dropped: DeepSpeed ignores it as well")
    for key in list(config):
        if key not in _schema() and not key.startswith(("_", "//")):
            del config[key]
            lines.append(f"{key}: dropped, a key that DeepSpeed ignores as well")
    lines += _with_booleans(config, _schema())
    lines += _switch_on_around(config)
    if not torch.cuda.is_available():
        lines += _without_cpu_offload(config)
    if isinstance(config.get("log_level"), str):
        config["log_level"] = config["log_level"].lower()
    params = (config.get("optimizer") or {}).get("params")
    if isinstance(params, dict) and params.pop("comm_backend_name", None) is not None:
        lines.append("optimizer.params.comm_backend_name: dropped: signs travel by the engine's own groups")
    return config, lines


def read_config(config: Any, args: object = None) -> tuple[dict[str, Any], Config]:
    """(the configuration as it was given, as a dictionary; what Deeptide read of it). Tells each translation once."""
    given = as_dict(config, args)
    translated, lines = translate(given)
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            say(f"as deepspeed: {line}")
    try:
        return given, load_config(translated)
    except ConfigError as error:
        if value_at(given, "elasticity.enabled", False) and "elastic" in str(error):
            from deeptide.elasticity import ElasticityConfigError

            raise ElasticityConfigError(str(error)) from None
        raise


def counted_once(given: dict[str, Any], config: Config, ranks: int) -> Config:
    """The configuration with a train_batch_size of as many samples as a step has, of `ranks` ranks without an mpu.

    DeepSpeed multiplies by all ranks there, and so do the libraries that fill it in: what ranks share layers for is
    counted by each of them. Left as it is: one that fits the ranks which take different samples, and one that fits
    neither.
    """
    shared = json.loads(_C.config_section(config, "tensor_parallel"))["autotp_size"]
    train = given.get("train_batch_size")
    if shared < 2 or ranks % shared or "parallel" in given or not isinstance(train, int) or train % shared:
        return config
    micro, steps = (given.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if isinstance(micro, int) and isinstance(steps, int) and micro * steps * (ranks // shared) == train:
        return config
    if os.environ.get("RANK", "0") == "0":
        say(
            f"as deepspeed: train_batch_size: {train} counts a sample once for each of the {shared} ranks that share "
            f"layers: a step has {train // shared}"
        )
    return load_config(translate({**given, "train_batch_size": train // shared})[0])


_SECTIONS = "engine.config has the section as it was given, and docs/config.md its keys"
# Attributes that are a key of the configuration, or else DeepSpeed's default.
_VALUES: dict[str, tuple[str, Any]] = {
    name: (path or name, default)
    for name, path, default in (
        ("aio_config", "aio", None),
        ("buffer_dtype", "data_types.buffer_dtype", None),
        ("checkpoint_config", "checkpoint", {}),
        ("checkpoint_parallel_write_pipeline", "checkpoint.parallel_write.pipeline_stage", False),
        ("communication_data_type", "", None),
        ("data_efficiency_config", "data_efficiency", {}),
        ("data_efficiency_enabled", "data_efficiency.enabled", False),
        ("dataloader_drop_last", "", False),
        ("disable_allgather", "", False),
        ("disable_python_gc", "", False),
        ("eigenvalue_enabled", "quantize_training.eigenvalue.enabled", False),
        ("grad_accum_dtype", "data_types.grad_accum_dtype", None),
        ("gradient_predivide_factor", "", 1.0),
        ("load_universal_checkpoint", "checkpoint.load_universal", False),
        ("log_level", "", None),
        ("memory_breakdown", "", False),
        ("optimizer_legacy_fusion", "optimizer.legacy_fusion", False),
        ("param_dtype", "data_types.param_dtype", None),
        ("pipeline", "", {}),
        ("prescale_gradients", "", False),
        ("torch_autocast_enabled", "torch_autocast.enabled", False),
        ("torch_autocast_lower_precision_safe_modules", "torch_autocast.lower_precision_safe_modules", None),
        ("use_node_local_storage", "checkpoint.use_node_local_storage", False),
        ("wall_clock_breakdown", "", False),
        ("zero_force_ds_cpu_optimizer", "", True),
    )
}


class BatchSizeError(ConfigError, AssertionError):
    """Batch sizes that do not fit, for which DeepSpeed raises AssertionError."""


class DeepSpeedConfig:
    """The values of a configuration that scripts read by attribute, resolved for the world that the ranks form."""

    def __init__(self, config: Any, mpu: object = None, mesh_device: object = None) -> None:
        self._param_dict, parsed = read_config(config)
        self._parsed = parsed
        world = int(os.environ.get("WORLD_SIZE", "1"))
        sizes = parsed.batch_sizes(world)
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation
        self.gradient_clipping = parsed.gradient_clipping
        self.gradient_allreduce_op = str(self._param_dict.get("gradient_allreduce_op", "mean")).lower()
        self.steps_per_print = parsed.steps_per_print
        self.zero_optimization_stage = parsed.zero.stage
        self.zero_enabled = parsed.zero.stage > 0
        self.fp16_enabled, self.bfloat16_enabled = parsed.fp16, parsed.bf16
        self.optimizer_name = str((self._param_dict.get("optimizer") or {}).get("type", "")).lower() or None
        self.optimizer_params = (self._param_dict.get("optimizer") or {}).get("params")
        self.scheduler_name = parsed.scheduler.type or None
        self.scheduler_params = (self._param_dict.get("scheduler") or {}).get("params")
        self.zero_allow_untested_optimizer = True
        self.dump_state = bool(self._param_dict.get("dump_state", False))

    def __getattr__(self, name: str) -> Any:
        if name in _VALUES:
            return value_at(self.__dict__["_param_dict"], *_VALUES[name])
        refused = surface.refused("deepspeed.runtime.config:DeepSpeedConfig", name, _SECTIONS)
        raise refused or AttributeError(f"'DeepSpeedConfig' has no attribute '{name}'")

    @property
    def zero_config(self) -> Any:
        """The section "zero_optimization" as an object."""
        from deeptide.as_deepspeed.config.zero import get_zero_config

        return get_zero_config(self._param_dict)

    @property
    def monitor_config(self) -> Any:
        """The sections of monitors as objects."""
        from deeptide.as_deepspeed.config.monitor import get_monitor_config

        return get_monitor_config(self._param_dict)

    @property
    def float16_config(self) -> Any:
        """The section "fp16" as an object."""
        from deeptide.as_deepspeed.config.precision import get_float16_config

        return get_float16_config(self._param_dict)

    @property
    def bfloat16_config(self) -> Any:
        """The section "bf16" as an object."""
        from deeptide.as_deepspeed.config.precision import get_bfloat16_config

        return get_bfloat16_config(self._param_dict)

    @property
    def world_size(self) -> int:
        """Ranks that train on different data, as the launcher says."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return int(os.environ.get("RANK", "0"))

    def _configure_train_batch_size(self) -> None:
        """Works out the sizes that are None from the others. Errors: BatchSizeError if they do not fit."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = {name: size for name in names if (size := getattr(self, name)) is not None}
        try:
            sizes = load_config(given).batch_sizes(self.world_size)
        except ConfigError as error:
            raise BatchSizeError(str(error)) from None
        for name, size in zip(names, (sizes.train, sizes.micro, sizes.accumulation)):
            setattr(self, name, size)

    def print_user_config(self) -> None:
        """Prints what was given."""
        self.print("json")

    def print(self, name: str) -> None:
        """Prints what was read."""
        print(f"{name}:\n{json.dumps(self._param_dict, indent=2, default=str)}")
