# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.zero.config: the section "zero_optimization" as an object, with DeepSpeed's defaults."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from deeptide._C import ConfigError
from deeptide.as_deepspeed.config.configuration import OffloadDeviceEnum, ZeroStageEnum
from deeptide.as_deepspeed.helpers.logging import logger

_BILLION = 1_000_000_000
MIN_SWAPPABLE_BYTES = 1 << 20
DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{name}.modeling_{name}.{block}SparseMoeBlock"
    for name, block in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def invalid(kind: type, text: str) -> ValueError:
    """The error for a value: pydantic's own where the program has it, as DeepSpeed's programs expect."""
    if "pydantic" not in sys.modules:
        return ConfigError(text)
    from pydantic import ValidationError
    from pydantic_core import PydanticCustomError

    return ValidationError.from_exception_data(
        kind.__name__, [{"type": PydanticCustomError("value_error", text), "loc": (), "input": None}]
    )


class DeepSpeedConfigModel:
    """Keys of one section as attributes: those that were given, and the defaults of the others."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    PREFIX: ClassVar[str] = ""  # under which DeepSpeed's files spell some of the keys

    def __init__(self, strict: bool = False, **given: Any) -> None:
        for key, value in self.DEFAULTS.items():
            setattr(self, key, value)
        for key, value in given.items():
            name = key.removeprefix(self.PREFIX) if self.PREFIX else key
            name = key if key in self.DEFAULTS else name
            if name not in self.DEFAULTS:
                known = ", ".join(self.DEFAULTS)
                raise invalid(type(self), f"{type(self).__name__}: unknown key '{key}'; expected one of {known}")
            if value != "auto" or strict:
                setattr(self, name, value)

    def model_dump(self) -> dict[str, Any]:
        """All keys and values."""
        return {
            key: value.model_dump() if isinstance(value, DeepSpeedConfigModel) else value
            for key, value in ((key, getattr(self, key)) for key in self.DEFAULTS)
        }

    dict = model_dump

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.model_dump().items())})"


class _OffloadConfig(DeepSpeedConfigModel):
    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(strict, **given)
        try:
            self.device = OffloadDeviceEnum(getattr(self, "device", "none"))
        except ValueError:
            raise ConfigError(f'device: got {given["device"]!r}, expected "none", "cpu" or "nvme"') from None


class DeepSpeedZeroOffloadParamConfig(_OffloadConfig):
    """The section "offload_param"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": _BILLION,
        "pin_memory": True,
    }


class DeepSpeedZeroOffloadOptimizerConfig(_OffloadConfig):
    """The section "offload_optimizer"."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 4,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with steps."""
        return bool(self.pipeline_read or self.pipeline_write)  # type: ignore[attr-defined]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The section "leaf_module"; a run needs none of it, since ranks may take different branches."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "classes": DEFAULT_LEAF_MODULE_CLASSES,
        "names": DEFAULT_LEAF_MODULE_NAMES,
        "name_suffixes": DEFAULT_LEAF_MODULE_NAME_SUFFIXES,
    }

    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(strict, **given)
        for key in self.DEFAULTS:
            value = getattr(self, key)
            setattr(self, key, list(dict.fromkeys([value] if isinstance(value, str) else map(str, value))))


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The section "zero_optimization"; what a run does with each key, docs/config.md says."""

    stage: ZeroStageEnum
    offload_param: Any
    offload_optimizer: Any

    PREFIX = "stage3_"
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "stage": ZeroStageEnum.disabled,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "offload_param": None,
        "offload_optimizer": None,
        "sub_group_size": _BILLION,
        "cpu_offload": None,
        "cpu_offload_param": None,
        "cpu_offload_use_pin_memory": None,
        "prefetch_bucket_size": 50_000_000,
        "param_persistence_threshold": 100_000,
        "model_persistence_threshold": sys.maxsize,
        "max_live_parameters": _BILLION,
        "max_reuse_distance": _BILLION,
        "gather_16bit_weights_on_model_save": True,  # as the engine does without it; DeepSpeed: False
        "stage3_gather_fp16_weights_on_model_save": False,
        "module_granularity_threshold": 0,
        "use_all_reduce_for_fetch_params": False,
        "ignore_unused_parameters": True,
        "legacy_stage1": False,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "zeropp_loco_param": None,
        "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "fast_sharding_for_leaf_module": False,
        "leaf_module": None,
        "zenflow": None,
        "compute_grad_norm": True,
        "allgather_sequential": False,
        "parameter_alignment": False,
        "save_muon_momentum_buffer_in_memory": False,
    }

    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(strict, **given)
        values = self.__dict__
        try:
            self.stage = ZeroStageEnum(values["stage"])
        except ValueError:
            raise ConfigError(f"zero_optimization.stage: got {values['stage']!r}, expected 0, 1, 2 or 3") from None
        if self.stage == ZeroStageEnum.weights and values["elastic_checkpoint"]:
            logger.warning("ZeRO-3 elastic checkpointing is deprecated: any world loads any checkpoint; leave it out")
        for name, kind in (
            ("offload_param", DeepSpeedZeroOffloadParamConfig),
            ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ):
            old = "cpu_offload" if name == "offload_optimizer" else "cpu_offload_param"
            if values[name] is None and values[old]:
                values[name] = {"device": "cpu"}
            if isinstance(values[name], dict):
                values[name] = kind(**values[name])
            elif not isinstance(values[name], (kind, type(None))):
                raise invalid(kind, f"zero_optimization.{name}: got {values[name]!r}, expected an object")
        if not isinstance(values["leaf_module"], DeepSpeedZeroLeafModuleConfig):
            values["leaf_module"] = DeepSpeedZeroLeafModuleConfig(**(values["leaf_module"] or {}))
        if values["overlap_comm"] is None:
            values["overlap_comm"] = self.stage == ZeroStageEnum.weights
        if values["stage3_gather_fp16_weights_on_model_save"]:  # its older name
            values["gather_16bit_weights_on_model_save"] = True


def zero_section(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of "zero_optimization", with those that libraries write as "zero_optimization.key"."""
    given = config.get("zero_optimization") or {}
    section = {"stage": 1} if given is True else {key: given[key] for key in given if key[:1] not in "_/"}
    for key, value in config.items():
        if key.startswith("zero_optimization."):
            section[key.partition(".")[2]] = value
    return section


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """That of a whole configuration. Errors: ConfigError naming a key that DeepSpeed does not have either."""
    return DeepSpeedZeroConfig(**zero_section(param_dict))
