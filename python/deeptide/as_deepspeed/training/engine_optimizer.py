# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer that deepspeed.initialize returns: public attributes of DeepSpeed's ZeRO optimizers besides torch's.

Flat masters are copies to read. Other buffers and buckets are refused by name: the engine keeps and reduces its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deeptide import utils
from deeptide.as_deepspeed.names import surface
from deeptide.optimizer import DeeptideOptimizer

_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_INSIDE = "it is a part of how DeepSpeed shards; safe_get_* and safe_set_* of deepspeed.utils reach all states"

# Attributes that are an answer of the engine's.
_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "bf16_master_weights_and_gradients": lambda engine: engine.bf16_master_weights_and_gradients(),
    "bf16_optimizer_states": lambda engine: engine.bf16_optimizer_states(),
    "clip_grad": lambda engine: engine.gradient_clipping(),
    "communication_data_type": lambda engine: engine.communication_data_type,
    "contiguous_gradients": lambda engine: engine.zero_contiguous_gradients(),
    "cpu_offload": lambda engine: engine.zero_cpu_offload(),
    "device": lambda engine: engine.device,
    "dp_process_group": lambda engine: engine.data_parallel_group,
    "dtype": lambda engine: engine.get_data_types()[0],
    "dynamic_loss_scale": lambda engine: engine.dynamic_loss_scale(),
    "elastic_checkpoint": lambda engine: engine.zero_elastic_checkpoint(),
    "fp16_master_weights_and_gradients": lambda engine: engine.fp16_master_weights_and_gradients(),
    "gradient_accumulation_dtype": lambda engine: engine.get_data_types()[1],
    "gradient_accumulation_steps": lambda engine: engine.gradient_accumulation_steps(),
    "gradient_predivide_factor": lambda engine: engine.gradient_predivide_factor(),
    "has_moe_layers": lambda engine: False,
    "ignore_unused_parameters": lambda engine: engine.zero_ignore_unused_parameters(),
    "is_gradient_accumulation_boundary": lambda engine: engine.is_gradient_accumulation_boundary(),
    "model_parallel_rank": lambda engine: engine.get_model_parallel_rank(),
    "model_parallel_world_size": lambda engine: engine.mp_world_size,
    "module": lambda engine: engine.module,
    "mpu": lambda engine: engine.mpu,
    "overlap_comm": lambda engine: engine.zero_overlap_comm(),
    "param_names": lambda engine: engine.param_names,
    "partial_offload": lambda engine: engine.zero_partial_offload(),
    "partition_count": lambda engine: engine.dp_world_size,
    "partition_gradients": lambda engine: engine.zero_optimization_partition_gradients(),
    "postscale_gradients": lambda engine: engine.postscale_gradients(),
    "reduce_bucket_size": lambda engine: engine.zero_reduce_bucket_size(),
    "reduce_scatter": lambda engine: engine.zero_reduce_scatter(),
    "round_robin_gradients": lambda engine: engine.zero_round_robin_gradients(),
    "sequence_parallel_size": lambda engine: 1,
    "sub_group_size": lambda engine: engine.zero_sub_group_size(),
    "zero_stage_string": lambda engine: f"ZeRO-{engine.zero_optimization_stage()}",
}

# The flat masters: of which stages, and with which types. Copies: a write is an error.
_FLAT: dict[str, Callable[[Any], bool]] = {
    "fp32_groups_flat": lambda engine: engine.zero_optimization_stage() == 0 and engine.fp16_enabled(),
    "fp32_groups_flat_partition": lambda engine: engine.zero_optimization_stage() <= 1 and engine.bfloat16_enabled(),
    "fp32_partitioned_groups_flat": lambda engine: engine.zero_optimization_stage() == 3,
    "single_partition_of_fp32_groups": lambda engine: engine.zero_optimization_stage() in (1, 2),
}


class EngineOptimizer(DeeptideOptimizer):
    """The engine's optimizer under DeepSpeed's names."""

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS and self.__dict__.get("_engine") is not None:
            return _ANSWERS[name](self._live_engine())
        if name in _FLAT and self.__dict__.get("_engine") is not None and _FLAT[name](self._live_engine()):
            from deeptide.as_deepspeed.training import masters

            return [masters.flat(group) for group in self.bit16_groups]
        for key in (_ZERO_3, _ZERO_12):
            refused = surface.refused(key, name, _INSIDE)
            if refused is not None:
                raise refused
        raise AttributeError(f"the optimizer of deepspeed.initialize has no attribute '{name}'")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The program's own optimizer; of the configuration's, this one."""
        return self if self.plan.given is None else self.plan.given

    @property
    def bit16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.param_groups]

    trainable_param_groups = fp16_groups = bit16_groups

    def get_lr(self) -> float:
        """The first group's learning rate."""
        rate: float = self.param_groups[0]["lr"]
        return rate

    def set_lr(self, lr: float) -> None:
        """Sets every group's."""
        for group in self.param_groups:
            group["lr"] = lr

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """engine.backward(loss)."""
        self._live_engine().backward(loss, retain_graph=retain_graph)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """engine.set_gradient_accumulation_boundary."""
        self._live_engine().set_gradient_accumulation_boundary(is_boundary)

    def refresh_fp32_params(self) -> None:
        """Has no effect: what is written into parameters reaches the masters by itself."""

    def empty_partition_cache(self) -> None:
        """Has no effect: whole parameters are dropped as soon as operators have used them."""

    def get_full_hp_param(self, param: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
        """safe_get_full_fp32_param, or safe_get_full_optimizer_state of a key. Collective."""
        if optim_state_key is None:
            return utils.safe_get_full_fp32_param(param)
        return utils.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: torch.Tensor, optim_state_key: str | None = None) -> None:
        """Likewise, writes. Collective."""
        if optim_state_key is None:
            utils.safe_set_full_fp32_param(param, value)
        else:
            utils.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """safe_get_full_grad. Collective."""
        return utils.safe_get_full_grad(param)

    def get_local_fp32_param(self, param: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
        """safe_get_local_fp32_param, or safe_get_local_optimizer_state of a key. Collective."""
        if optim_state_key is None:
            return utils.safe_get_local_fp32_param(param)
        return utils.safe_get_local_optimizer_state(param, optim_state_key)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """engine.offload_states."""
        self._live_engine().offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """engine.reload_states."""
        self._live_engine().reload_states(non_blocking)
