# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's engine answers about itself: values of the configuration, and what is always or never so here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeptide._C import Config

# Methods without arguments that always give this, whatever the configuration.
CONSTANTS: dict[str, Any] = {
    "amp_enabled": False,
    "autotuning_enabled": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "curriculum_learning_enabled": False,
    "curriculum_enabled_legacy": False,
    "data_efficiency_enabled": False,
    "data_sampling_enabled": False,
    "eigenvalue_enabled": False,
    "flops_profiler_enabled": False,
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "is_first_weights_partition_group": True,
    "load_universal_checkpoint": False,
    "managed_gradient_accumulation": True,
    "memory_breakdown": False,
    "optimizer_legacy_fusion": False,
    "pld_enabled": False,
    "quantize_training": False,
    "random_ltd_enabled": False,
    "super_offload": False,
    "use_node_local_storage": False,
    "zero_allow_untested_optimizer": True,
    "zero_cpu_offload": False,
    "zero_elastic_checkpoint": True,
    "zero_has_nvme_offload": False,
    "zero_hpz_partition_size": 1,
    "zero_ignore_unused_parameters": True,
    "zero_legacy_stage1": False,
    "zero_nvme_offload_optimizer": False,
    "zero_offload_optimizer": None,
    "zero_offload_param": None,
    "zero_partial_offload": 1.0,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
    "zero_use_cpu_optimizer": False,
}


class EngineAnswers:
    """The methods; of DeepSpeedEngine."""

    if TYPE_CHECKING:
        _config: Config
        optimizer: Any
        given_config: dict[str, Any]
        world_size: int
        global_rank: int

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
        """Of fp16."""
        power = (self.given_config.get("fp16") or {}).get("initial_scale_power", 16)
        return float(2 ** int(power))

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

    def zero_optimization_partition_gradients(self) -> bool:
        """Stages 2 and 3."""
        return self._config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Stage 3."""
        return self._config.zero.stage == 3

    def get_data_parallel_rank(self) -> int:
        """This rank's number: all ranks take different data."""
        return self.global_rank

    def get_tensor_parallel_rank(self) -> int:
        """Always 0 here."""
        return 0

    get_model_parallel_rank = get_tensor_parallel_rank

    @property
    def dp_world_size(self) -> int:
        """All ranks take different data."""
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        """Always 1 here."""
        return 1
