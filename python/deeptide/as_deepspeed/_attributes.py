# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Public attributes of DeepSpeed's engine besides its answers: what programs read of it, and what it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deeptide.as_deepspeed.helpers import groups
from deeptide.timers import ThroughputTimer

if TYPE_CHECKING:
    import torch.distributed as dist

# Always so here: there are no experts, no sequence parallelism, no backend for collectives but torch's.
VALUES: dict[str, Any] = {
    "all_to_all_group": None,
    "checkpoint_mp_rank": 0,
    "dont_change_device": False,
    "enable_backward_allreduce": True,
    "expert_data_parallel_group": {},
    "expert_parallel_group": {},
    "first_dataloader_check": None,
    "gate_modules": [],
    "has_moe_layers": False,
    "loaded_checkpoint_mp_world_size": None,
    "local_all_to_all_group": None,
    "mesh_device": None,
    "moe_layers": [],
    "num_experts": [],
    "optimized_linear_base_weight_sharding": False,
    "optimized_linear_lora_enabled": False,
    "seq_parallel_group": None,
    "sequence_parallel_size": 1,
    "torch_autocast_z0_gradscaler": None,
    "use_ds_comm": False,
    "warn_unscaled_loss": True,
}


class EngineAttributes:
    """Attributes, for DeepSpeedEngine."""

    client_optimizer: Any = None  # what initialize was given
    client_lr_scheduler: Any = None
    collate_fn: Any = None
    training_data: Any = None
    mpu: Any = None

    if TYPE_CHECKING:
        module: torch.nn.Module
        optimizer: Any
        given_config: dict[str, Any]
        _grid: Any
        _in_no_sync: bool
        _coalesces: bool
        dp_world_size: int

        def train_batch_size(self) -> int: ...
        def fp16_enabled(self) -> bool: ...
        def bfloat16_enabled(self) -> bool: ...
        def save_16bit_model(
            self, save_dir: Any, save_filename: str, exclude_frozen_parameters: bool = False
        ) -> bool: ...

    def _make_timer(self) -> None:
        self.tput_timer = ThroughputTimer(None, self.train_batch_size())

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer without the engine's part: the program's own, or the engine's."""
        return self.optimizer if self.client_optimizer is None else self.client_optimizer

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that train on different data."""
        return groups.get_data_parallel_group() if self._grid is None else self._grid.get_data_parallel_group()

    seq_data_parallel_group = data_parallel_group

    @property
    def seq_dp_world_size(self) -> int:
        """How many they are."""
        return self.dp_world_size

    @property
    def dist_backend(self) -> str:
        """The name of the backend of collectives."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    @property
    def pipeline_parallelism(self) -> bool:
        """Whether the model is a PipelineModule, or cut into stages."""
        return False

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether no_sync() or coalesce_grad_reduction() is entered."""
        return self._in_no_sync or self._coalesces

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Whether it has samples by number, and their count."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Whether it is torch's IterableDataset."""
        return isinstance(obj, torch.utils.data.IterableDataset)

    @staticmethod
    def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
        """One flat tensor of several."""
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
        return flat

    @staticmethod
    def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        """Views of a flat tensor, shaped as several."""
        return torch._utils._unflatten_dense_tensors(flat, tensors)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(the type that parameters compute in, the type in which gradients accumulate)."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        named: Any = (self.given_config.get("data_types") or {}).get("grad_accum_dtype")
        return model, {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.get(named, model)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The configuration's numbers of a dynamic fp16 scale."""
        fp16 = self.given_config.get("fp16") or {}
        return {
            "init_scale": 2 ** int(fp16.get("initial_scale_power", 16)),
            "scale_window": fp16.get("loss_scale_window", 1000),
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": fp16.get("hysteresis", 2),
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        }

    @property
    def gradient_average(self) -> bool:
        """Whether ranks' gradients are averaged, and not summed."""
        return str(self.given_config.get("gradient_allreduce_op", "mean")).lower() == "mean"

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds by name: none, since the engine's times are in its reports."""
        return {}

    def save_fp16_model(self, save_dir: Any, save_filename: str = "pytorch_model.bin") -> bool:
        """The first name of save_16bit_model."""
        return self.save_16bit_model(save_dir, save_filename, False)

    @staticmethod
    def all_gather_scalar(value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """Every rank's value. Collective."""
        import torch.distributed as dist

        values = [torch.zeros_like(value) for _ in range(dist.get_world_size(dp_group))]
        dist.all_gather(values, value, group=dp_group)
        return values
