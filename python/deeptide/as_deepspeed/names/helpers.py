# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the list of names that scripts import for small things: timers, norms, builders, constants."""

from __future__ import annotations

import ast
from pathlib import Path

from deeptide.as_deepspeed.names.entries import Name, absent, differs, ours, works

_RUNNER = "`deeptide -H hostfile` starts ranks on all hosts; --launcher chooses pdsh, slurm or mpi"
_GLOBAL_NORM = "engine.get_global_grad_norm() has the norm of the last step"


def _assigned(module: str) -> list[str]:
    """The constants that a module of this package assigns: read, since importing this one loads nothing."""
    path = Path(__file__).resolve().parents[1].joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]


def _all(module: str, *names: str) -> dict[str, Name]:
    return {name: ours(f"{module}:{name}") for name in names}


def _monitors(*names: str) -> dict[str, Name]:
    return {name: works(f"deeptide.monitor:{name}") for name in names}


_BUILDER_WORDS = (
    "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder CPUOpBuilder CUDAOpBuilder "
    "DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder "
    "FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder OpBuilder "
    "PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder "
    "SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder "
    "UtilsBuilder get_default_compute_capabilities "
)

_HOST_FUNCTIONS = (
    "_parse_hostfile apply_num_nodes_and_gpus encode_world_info fetch_hostfile parse_inclusion_exclusion "
    "parse_node_config parse_node_config_list parse_resource_filter"
)
_CONFIG_FUNCTIONS = (
    "get_communication_data_type get_dataloader_drop_last get_dump_state get_gradient_accumulation_steps "
    "get_gradient_clipping get_gradient_predivide_factor get_log_level get_memory_breakdown get_optimizer_name "
    "get_optimizer_params get_prescale_gradients get_scheduler_name get_scheduler_params get_steps_per_print "
    "get_train_batch_size get_train_micro_batch_size_per_gpu get_wall_clock_breakdown "
    "get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer"
)

_SPARSE_WORDS = (
    "BSLongformerSparsityConfig BertSparseSelfAttention BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig "
    "LocalSlidingWindowSparsityConfig SparseAttentionUtils SparseSelfAttention SparsityConfig VariableSparsityConfig"
)

HELPERS: dict[str, dict[str, Name]] = {
    "deepspeed.ops": {
        "__compatible_ops__": ours("helpers.op_builders:COMPATIBLE"),
        "__installed_ops__": ours("helpers.op_builders:COMPATIBLE"),
    },
    "deepspeed.ops.aio": _all("helpers.op_builders", "AsyncIOBuilder", "GDSBuilder"),
    "deepspeed.ops.sparse_attention": {
        **{name: works(f"deeptide.ops.sparse_attention:{name}") for name in _SPARSE_WORDS.split()},
        "MatMul": absent("deeptide.ops.sparse_attention.sparse_attention attends in one call"),
        "Softmax": absent("deeptide.ops.sparse_attention.sparse_attention attends in one call"),
    },
    "deepspeed.ops.op_builder": _all("helpers.op_builders", *_BUILDER_WORDS.split()),
    "deepspeed.ops.op_builder.builder": _all(
        "helpers.op_builders", "OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", "get_default_compute_capabilities"
    ),
    "deepspeed.ops.op_builder.all_ops": _all("helpers.op_builders", "ALL_OPS"),
    "deepspeed.accelerator.cpu_accelerator": {"CPU_Accelerator": works("deeptide.accelerator:CPUAccelerator")},
    "deepspeed.accelerator.cuda_accelerator": {"CUDA_Accelerator": works("deeptide.accelerator:CUDAAccelerator")},
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": works("deeptide.accelerator:Accelerator")},
    "deepspeed.checkpoint": _all("constants.checkpoint", *_assigned("constants.checkpoint")),
    "deepspeed.checkpoint.constants": _all("constants.checkpoint", *_assigned("constants.checkpoint")),
    "deepspeed.elasticity": {
        "ensure_immutable_elastic_config": works("deeptide.elasticity:ensure_immutable_elastic_config")
    },
    "deepspeed.elasticity.config": {
        name: works(f"deeptide.elasticity:{name}")
        for name in ("ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize")
    },
    "deepspeed.launcher.multinode_runner": {
        name: absent(_RUNNER)
        for name in (
            "IMPIRunner",
            "MPICHRunner",
            "MVAPICHRunner",
            "MultiNodeRunner",
            "OpenMPIRunner",
            "PDSHRunner",
            "SlurmRunner",
        )
    },
    "deepspeed.runtime.constants": _all("constants.runtime", *_assigned("constants.runtime")),
    "deepspeed.comm": _all("helpers.collectives", "all_gather_coalesced"),
    "deepspeed.runtime.bf16_optimizer": _all("training.optimizers", "BF16_Optimizer"),
    "deepspeed.runtime.comm.coalesced_collectives": _all("helpers.collectives", "reduce_scatter_coalesced")
    | {"all_to_all_quant_reduce": absent('"zero_quantized_gradients" does it within the engine')},
    "deepspeed.runtime.config_utils": _all(
        "config.values", "dict_raise_error_on_duplicate_keys", "get_dict_param", "get_list_param", "get_scalar_param"
    ),
    "deepspeed.runtime.fp16.fused_optimizer": _all("training.optimizers", "FP16_Optimizer"),
    "deepspeed.runtime.fp16.loss_scaler": _all(
        "training.loss_scalers",
        "CONSECUTIVE_HYSTERESIS",
        "CreateLossScaler",
        "DELAYED_SHIFT",
        "DynamicLossScaler",
        "INITIAL_LOSS_SCALE",
        "LossScaler",
        "LossScalerBase",
        "MIN_LOSS_SCALE",
        "SCALE_WINDOW",
        "to_python_float",
    ),
    "deepspeed.runtime.fp16.unfused_optimizer": _all("training.optimizers", "FP16_UnfusedOptimizer"),
    "deepspeed.launcher.runner": {
        **_all("helpers.hostfile", *_HOST_FUNCTIONS.split()),
        **_all("constants.launcher", "DLTS_HOSTFILE", "EXCLUDE_ENVS", "EXPORT_ENVS", "PDSH_MAX_FAN_OUT"),
    },
    "deepspeed.launcher.constants": _all(
        "constants.launcher",
        *(
            name
            for name in _assigned("constants.launcher")
            if name.endswith("_LAUNCHER") or name[:5] in ("PDSH_", "MVAPI")
        ),
    ),
    "deepspeed.runtime.lr_schedules": _all("constants.schedules", *_assigned("constants.schedules")),
    "deepspeed.runtime.precision_config": _all(
        "config.precision", "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        name: differs(f"tensor.tiled:{name}", "backward computes each shard again; compute_params need not be named")
        for name in ("SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute")
    },
    "deepspeed.runtime.zero.config": _all(
        "config.zero", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"
    ),
    "deepspeed.runtime.swap_tensor": {
        "MIN_SWAPPABLE_BYTES": differs("config.zero:MIN_SWAPPABLE_BYTES", "states of every size go to files here")
    },
    "deepspeed.runtime.zero.linear": {
        **{
            name: differs(f"helpers.flat:{name}", "torch's own linear, which saves no gathered weight here")
            for name in ("LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap")
        },
        **_all("helpers.flat", "autocast_custom_bwd", "autocast_custom_fwd"),
    },
    "deepspeed.runtime.zero.leaf_module_config": _all(
        "config.zero",
        "DEFAULT_LEAF_MODULE_CLASSES",
        "DEFAULT_LEAF_MODULE_NAMES",
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "deepspeed.runtime.zero.tiling": _all(
        "tensor.tiled", "TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"
    ),
    "deepspeed.utils.torch": _all("versions", "required_torch_version"),
    "deepspeed.runtime.config": _all("config.values", *_CONFIG_FUNCTIONS.split())
    | _all(
        "config.configuration",
        "ADAM_W_MODE",
        "ADAM_W_MODE_DEFAULT",
        "DEEPSPEED_OPTIMIZERS",
        "MUON_OPTIMIZER",
        "TORCH_ADAM_PARAM",
    ),
    "deepspeed.runtime.fp16.onebit": {
        name: works(f"deeptide.ops.onebit:{name}") for name in ("OnebitAdam", "OnebitLamb")
    }
    | {"ZeroOneAdam": differs("deeptide.ops.onebit:ZeroOneAdam", "ranks exchange at every step: local_step_clipper=1")},
    "deepspeed.runtime.utils": {
        **_all("helpers.norms", "CheckOverflow", "DummyOptim", "get_global_norm", "get_weight_norm", "has_inf_or_nan"),
        **_all("helpers.norms", "clip_tensors_by_global_norm", "get_global_norm_of_tensors"),
        **_all("helpers.norms", "partition_balanced", "partition_uniform", "prefix_sum_inc"),
        **_all(
            "helpers.small", "call_to_str", "empty_cache", "ensure_directory_exists", "move_to_device", "noop_decorator"
        ),
        "clip_grad_norm_": differs(
            "helpers.norms:clip_grad_norm_",
            'of parameters that have .grad; an engine clips by "gradient_clipping", and keeps .grad with "keep_grad"',
        ),
        "get_grad_norm": differs("helpers.norms:get_grad_norm", f"of parameters that have .grad; {_GLOBAL_NORM}"),
    },
    "deepspeed.runtime.zero.utils": _all(
        "helpers.zero_utils",
        "ZeRORuntimeException",
        "assert_ints_same_as_other_ranks",
        "assert_lst_len_same_as_other_ranks",
    ),
    "deepspeed.utils": {
        "safe_update_full_grad_vectorized": works("deeptide.utils:safe_update_full_grad_vectorized"),
        **{
            name: differs(
                f"helpers.small:{name}", "nothing has to be marked: returns the modules and the names without one"
            )
            for name in ("set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix")
        },
    },
    "deepspeed.utils.groups": _all(
        "helpers.groups",
        "_get_broadcast_src_rank",
        "_get_zero_param_intra_parallel_group",
        "_zero_param_parallel_is_initialized",
        "get_tensor_model_parallel_src_rank",
        "mesh_device",
        "mpu",
    ),
    "deepspeed.utils.numa": _all("helpers.small", "parse_range_list"),
    "deepspeed.utils.tensor_fragment": {
        "safe_update_full_grad_vectorized": works("deeptide.utils:safe_update_full_grad_vectorized")
    },
    "deepspeed.utils.timer": {
        name: works(f"deeptide.timers:{name}")
        for name in (
            "BACKWARD_GLOBAL_TIMER",
            "BACKWARD_INNER_GLOBAL_TIMER",
            "BACKWARD_INNER_MICRO_TIMER",
            "BACKWARD_MICRO_TIMER",
            "BACKWARD_REDUCE_GLOBAL_TIMER",
            "BACKWARD_REDUCE_MICRO_TIMER",
            "FORWARD_GLOBAL_TIMER",
            "FORWARD_MICRO_TIMER",
            "NoopTimer",
            "STEP_GLOBAL_TIMER",
            "STEP_MICRO_TIMER",
            "SynchronizedWallClockTimer",
            "ThroughputTimer",
            "trim_mean",
        )
    },
    "deepspeed.monitor.monitor": _monitors("Monitor", "MonitorMaster"),
    "deepspeed.monitor.csv_monitor": _monitors("csvMonitor"),
    "deepspeed.monitor.tensorboard": _monitors("TensorBoardMonitor"),
    "deepspeed.monitor.wandb": _monitors("WandbMonitor"),
    "deepspeed.monitor.comet": _monitors("CometMonitor"),
    "deepspeed.profiling.flops_profiler": {
        name: works(f"deeptide.flops_profiler:{name}") for name in ("FlopsProfiler", "get_model_profile")
    },
}

ALIASES_OF_HELPERS = {
    "deepspeed.elasticity.elasticity": "deepspeed.elasticity",
    "deepspeed.runtime.swap_tensor.constants": "deepspeed.runtime.swap_tensor",
    "deepspeed.runtime.tiling": "deepspeed.runtime.zero.tiling",
    "deepspeed.ops.op_builder.async_io": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.cpu_adam": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.fused_adam": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.utils": "deepspeed.ops.op_builder",
    "deepspeed.profiling.flops_profiler.profiler": "deepspeed.profiling.flops_profiler",
    "deepspeed.runtime.fp16.onebit.adam": "deepspeed.runtime.fp16.onebit",
    "deepspeed.runtime.fp16.onebit.lamb": "deepspeed.runtime.fp16.onebit",
    "deepspeed.runtime.fp16.onebit.zoadam": "deepspeed.runtime.fp16.onebit",
}
