# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Answers like DeepSpeed's engine about itself: values of the configuration, and what is always or never so here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from deeptide.as_deepspeed.config.values import value_at
from deeptide.as_deepspeed.config.zero import DeepSpeedZeroConfig, get_zero_config

if TYPE_CHECKING:
    from deeptide._C import Config
    from deeptide.tensor.team import Team

# Methods without arguments that give a key of the configuration, or else DeepSpeed's default.
KEYS: dict[str, tuple[str, Any]] = {
    "aio_config": ("aio", None),
    "amp_enabled": ("amp.enabled", False),
    "autotuning_enabled": ("autotuning.enabled", False),
    "autotuning_end_profile_step": ("autotuning.end_profile_step", 5),
    "autotuning_metric": ("autotuning.metric", "throughput"),
    "autotuning_metric_path": ("autotuning.metric_path", None),
    "autotuning_model_info": ("autotuning.model_info", None),
    "autotuning_model_info_path": ("autotuning.model_info_path", None),
    "autotuning_profile_model_info": ("autotuning.model_info.profile", False),
    "autotuning_start_profile_step": ("autotuning.start_profile_step", 3),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "checkpoint_writer_enabled": ("checkpoint.writer", None),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
    "curriculum_learning_enabled": ("data_efficiency.data_sampling.curriculum_learning.enabled", False),
    "curriculum_learning_config": ("data_efficiency.data_sampling.curriculum_learning", None),
    "curriculum_params_legacy": ("curriculum_learning", None),
    "data_efficiency_config": ("data_efficiency", None),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_sampling_config": ("data_efficiency.data_sampling", None),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "eigenvalue_enabled": ("quantize_training.eigenvalue.enabled", False),
    "eigenvalue_gas_boundary_resolution": ("quantize_training.eigenvalue.gas_boundary_resolution", 1),
    "eigenvalue_layer_name": ("quantize_training.eigenvalue.layer_name", "bert.encoder.layer"),
    "eigenvalue_layer_num": ("quantize_training.eigenvalue.layer_num", 0),
    "eigenvalue_max_iter": ("quantize_training.eigenvalue.max_iter", 100),
    "eigenvalue_stability": ("quantize_training.eigenvalue.stability", 1e-6),
    "eigenvalue_tol": ("quantize_training.eigenvalue.tol", 1e-2),
    "eigenvalue_verbose": ("quantize_training.eigenvalue.verbose", False),
    "elasticity_enabled": ("elasticity.enabled", False),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "graph_harvesting": ("graph_harvesting", False),
    "is_deepcompile_enabled": ("compile.deepcompile", False),
    "log_level": ("log_level", None),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "memory_breakdown": ("memory_breakdown", False),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "pld_gamma": ("progressive_layer_drop.gamma", 0.001),
    "pld_params": ("progressive_layer_drop", None),
    "pld_theta": ("progressive_layer_drop.theta", 1.0),
    "quantize_training": ("quantize_training.enabled", False),
    "random_ltd_config": ("data_efficiency.data_routing.random_ltd", None),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "super_offload": ("zero_optimization.offload_optimizer.super_offload", False),
    "swap_tensor_config": ("aio", None),
    "tensor_parallel_config": ("tensor_parallel", None),
    "torch_autocast_lower_precision_safe_modules": ("torch_autocast.lower_precision_safe_modules", None),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "zenflow_config": ("zero_optimization.zenflow", None),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
}

# Methods that give an attribute of DeepSpeedZeroConfig.
ZERO: dict[str, str] = {
    f"zero_{name}": name
    for name in (
        "allgather_bucket_size",
        "allgather_partitions",
        "allgather_sequential",
        "compute_grad_norm",
        "contiguous_gradients",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "param_persistence_threshold",
        "parameter_alignment",
        "prefetch_bucket_size",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "sub_group_size",
    )
} | {
    "mics_shard_size": "mics_shard_size",
    "zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce",
    "zero_quantized_gradients": "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_quantized_weights",
}

# Files that lie in the working directory where the configuration names none.
_FILES = {
    "autotuning_metric_path": "autotuning_metric.json",
    "autotuning_model_info_path": "autotuning_model_info.json",
}

# Always so here, whatever the configuration.
CONSTANTS: dict[str, Any] = {
    "is_deepcompile_active": False,
    "is_first_weights_partition_group": True,
    "managed_gradient_accumulation": True,
}


def answer(name: str, config: dict[str, Any]) -> Any:
    """The value of the method `name` of one of these tables. Errors: KeyError for another name."""
    if name in ZERO:
        return getattr(get_zero_config(config), ZERO[name])
    if name in CONSTANTS:
        return CONSTANTS[name]
    value = value_at(config, *KEYS[name])
    if name in _FILES:
        return value or os.path.join(os.getcwd(), _FILES[name])
    if name == "checkpoint_writer_enabled":  # the writer's section
        return value is not None
    if name == "autotuning_profile_model_info":
        return bool(value_at(config, "autotuning.enabled", False) and value)
    return value


class EngineAnswers:
    """The methods; of DeepSpeedEngine."""

    if TYPE_CHECKING:
        _config: Config
        module: torch.nn.Module
        optimizer: Any
        given_config: dict[str, Any]
        tensor_team: Team | None

        @property
        def data_parallel_rank(self) -> int: ...
        @property
        def data_parallel_size(self) -> int: ...

    def optimizer_name(self) -> str:
        """The type of the configuration's optimizer, or the class of the program's."""
        section = self.given_config.get("optimizer")
        if isinstance(section, dict) and section.get("type"):
            return str(section["type"]).lower()
        return "" if self.optimizer is None else str(self.optimizer.info.name)

    def optimizer_params(self) -> dict[str, Any] | None:
        """The "params" of the configuration's optimizer."""
        return (self.given_config.get("optimizer") or {}).get("params")

    def scheduler_name(self) -> str | None:
        """The type of the configuration's schedule."""
        return self._config.scheduler.type or None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its "params"."""
        return (self.given_config.get("scheduler") or {}).get("params")

    def get_type(self) -> list[str]:
        """Each group's optimizer type."""
        return [] if self.optimizer is None else [self.optimizer_name()] * len(self.optimizer.param_groups)

    def dump_state(self) -> bool:
        """Whether the configuration is printed at the start."""
        return bool(self.given_config.get("dump_state", False))

    def dataloader_drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self._config.dataloader_drop_last

    def initial_dynamic_scale(self) -> float:
        """The scale that fp16 begins with."""
        power = (self.given_config.get("fp16") or {}).get("initial_scale_power", 16)
        return float(2 ** int(power))

    def _zero(self) -> DeepSpeedZeroConfig:
        return get_zero_config(self.given_config)

    def _offload_devices(self) -> list[str]:
        """The devices of the optimizer's states and of the parameters."""
        zero = self._zero()
        return ["none" if part is None else part.device for part in (zero.offload_optimizer, zero.offload_param)]

    def zero_cpu_offload(self) -> bool:
        """Whether the configuration asks for states in the CPU's memory."""
        return self._offload_devices()[0] == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the CPU steps: states are there or in files."""
        return self._offload_devices()[0] in ("cpu", "nvme")

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether states are in files."""
        return self._offload_devices()[0] == "nvme"

    def zero_has_nvme_offload(self) -> bool:
        """Whether states or parameters are in files."""
        return "nvme" in self._offload_devices()

    def zero_partial_offload(self) -> float:
        """The share of states that is offloaded (Twin-Flow); 1 without offloading."""
        section = self._zero().offload_optimizer
        return 1.0 if section is None else section.ratio

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks are to compare tags."""
        return str(value_at(self.given_config, "checkpoint.tag_validation", "warn")).lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether another tag is to be an error."""
        return str(value_at(self.given_config, "checkpoint.tag_validation", "warn")).lower() == "fail"

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are to be timed."""
        return bool(self.given_config.get("wall_clock_breakdown", False))

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they are summed."""
        return not self.given_config.get("prescale_gradients", False)

    def amp_params(self) -> dict[str, Any]:
        """The keys of "amp" besides "enabled"."""
        section = self.given_config.get("amp") or {}
        return {key: value for key, value in section.items() if key != "enabled"}

    @property
    def communication_data_type(self) -> torch.dtype:
        """The type that the configuration names, else the one in which parameters compute."""
        named = str(self.given_config.get("communication_data_type")).lower().removeprefix("torch.")
        for dtype, names in (
            (torch.float16, ("fp16", "float16", "half")),
            (torch.bfloat16, ("bf16", "bfloat16")),
            (torch.float32, ("fp32", "float32", "float")),
        ):
            if named in names:
                return dtype
        return torch.float16 if self._config.fp16 else torch.bfloat16 if self._config.bf16 else torch.float32

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """For `engine.scale(loss).backward()`: the loss, since gradients are scaled where they arrive."""
        return loss

    def _asks(self, section: str, key: str) -> bool:
        """Whether a section that is on has the key set."""
        given = self.given_config.get(section) or {}
        return bool(given.get("enabled") and given.get(key))

    def fp16_master_weights_and_gradients(self) -> bool:
        """Whether fp16 parameters are their own masters."""
        return self._asks("fp16", "fp16_master_weights_and_grads")

    def bf16_master_weights_and_gradients(self) -> bool:
        """Whether bf16 parameters are their own masters."""
        return self._asks("bf16", "bf16_master_weights_and_grads")

    def bf16_optimizer_states(self) -> bool:
        """Whether moments are bf16."""
        return self._asks("bf16", "bf16_optimizer_states")

    def sparse_gradients_enabled(self) -> bool:
        """Whether gradients of embeddings travel without their zeros."""
        return bool(self.given_config.get("sparse_gradients", False))

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The weights of embeddings whose gradients travel without their zeros."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        if not self.sparse_gradients_enabled():
            return set()
        return {f"{name}.weight" for name, module in self.module.named_modules() if isinstance(module, kinds)}

    def zero_optimization_partition_gradients(self) -> bool:
        """Stages 2 and 3."""
        return self._config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Stage 3."""
        return self._config.zero.stage == 3

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that take different data: of its stage, or of all."""
        return self.data_parallel_rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank's number among those that share its layers; 0 where none do."""
        return self.tensor_team.index if self.tensor_team else 0

    get_model_parallel_rank = get_tensor_parallel_rank

    @property
    def dp_world_size(self) -> int:
        """How many ranks take different data: those of a stage, or all."""
        return self.data_parallel_size

    @property
    def mp_world_size(self) -> int:
        """How many ranks share this one's layers."""
        return self.tensor_team.size if self.tensor_team else 1
