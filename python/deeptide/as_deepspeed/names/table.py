# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The one list of DeepSpeed's public names: what each is here. Modules, docs/from-deepspeed.md and tests follow it."""

from __future__ import annotations

from deeptide.as_deepspeed.names.entries import Name, Status, absent, differs, ours, torchs, works
from deeptide.as_deepspeed.names.features import ALIASES_OF_FEATURES, FEATURES
from deeptide.as_deepspeed.names.helpers import ALIASES_OF_HELPERS, HELPERS

__all__ = ["ALIASES", "ENGINE", "MODULES", "Name", "Status"]

_DUAL = "DualPipeV is not here; PipelineModule trains by 1f1b, gpipe, interleaved, zero_bubble"
_PIPE_ENGINE = (
    "has train_batch() and eval_batch(); stages exchange by Deeptide's channels, and ZeRO 0 to 3 goes with it"
)
_PIPE_MODULE = (
    'partition_method "profile" and "memory" work too, on a micro-batch in profile_input; the axes of topology are '
    "pipe, data and model, whose ranks share layers of deeptide.tensor's"
)
_MOE = "there is no expert parallelism yet; MoE layers of transformers work with ZeRO as they are"
_TENSOR = "ranks share layers by neighbours; on CPUs; a small forward is compared with the whole model's"
_SEQUENCE = "there is no sequence parallelism yet; use gradient checkpointing for long sequences"
_INFERENCE = "there is no inference engine; the model's own generate() works, also between steps"
_LAYER = "results repeat, so stochastic_mode changes nothing; GELU by tanh, as there"
_ZENFLOW = "ZenFlow is not here yet"
_HYBRID = "there is no hybrid engine; engine.module.generate() works between steps"

_STATE_FUNCTIONS = {
    name: works(f"deeptide.utils:{name}")
    for name in ("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state")
} | {
    name: ours(f"checkpoint.states:{name}")
    for name in (
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
    )
}

_COMM = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_rank",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
]
_COMM_OURS = [
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_world_group",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "initialize_mesh_device",
]

_GROUPS = {
    **{
        name: ours(f"helpers.groups:{name}")
        for name in (
            "_clone_world_group",
            "_get_data_parallel_group",
            "_get_data_parallel_group_ranks",
            "_get_data_parallel_rank",
            "_get_data_parallel_world_size",
            "_get_model_parallel_world_size",
            "_get_sequence_data_parallel_group",
            "_get_sequence_data_parallel_rank",
            "_get_sequence_data_parallel_world_size",
            "_get_sequence_parallel_group",
            "_get_sequence_parallel_rank",
            "_get_sequence_parallel_world_size",
            "get_data_parallel_group",
            "get_data_parallel_rank",
            "get_data_parallel_world_size",
            "get_model_parallel_group",
            "get_model_parallel_rank",
            "get_model_parallel_world_size",
            "get_tensor_model_parallel_group",
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_world_size",
        )
    },
    "initialize": absent(_MOE),
    "_get_expert_parallel_group": absent(_MOE),
    "_get_expert_parallel_rank": absent(_MOE),
    "_get_expert_parallel_world_size": absent(_MOE),
    "_get_expert_data_parallel_group": absent(_MOE),
    "_get_max_expert_size_name": absent(_MOE),
}

_SCHEDULES = {
    **{name: ours(f"training.schedules:{name}") for name in ("VALID_LR_SCHEDULES", "WarmupLR", "WarmupDecayLR")},
    **{name: ours(f"training.schedules:{name}") for name in ("WarmupCosineLR", "OneCycle", "LRRangeTest")},
    **{
        name: works(f"deeptide._process.arguments:{name}")
        for name in ("add_tuning_arguments", "get_config_from_args", "get_lr_from_config")
    },
}

_LEAVES = "nothing has to be marked: ranks may take different branches. Says so, and returns the modules it matched"
_CHECKPOINTING = {
    name: ours(f"training.checkpointing:{name}")
    for name in (
        "CheckpointFunction",
        "configure",
        "get_cuda_rng_tracker",
        "is_configured",
        "model_parallel_cuda_manual_seed",
        "model_parallel_reconfigure_tp_seed",
        "non_reentrant_checkpoint",
        "partition_activations_in_checkpoint",
        "reset",
        "set_num_layers",
    )
} | {"checkpoint": differs("training.checkpointing:checkpoint", "torch.utils.checkpoint, reentrant as in DeepSpeed")}

_LOGGING = {
    name: ours(f"helpers.logging:{name}") for name in ("logger", "log_dist", "log_dist_once", "print_rank_0")
} | {name: ours(f"helpers.logging:{name}") for name in ("set_log_level_from_string", "warning_once", "should_log_le")}

_ZERO = {
    "Init": differs("checkpoint.parameters:Init", "built without memory; initialize makes the values, unit by unit"),
    "GatheredParameters": differs(
        "deeptide.zero:GatheredParameters",
        "without modifier_rank, writes stay where a rank holds parameters whole (stages 0 to 2, ranks of one host)",
    ),
    "register_external_parameter": differs(
        "deeptide.zero:register_external_parameter", "does nothing: any operator may use any parameter"
    ),
    "unregister_external_parameter": differs("deeptide.zero:unregister_external_parameter", "does nothing"),
    "ZeroParamStatus": works("deeptide.zero:ZeroParamStatus"),
    "ZeroParamType": works("deeptide.zero:ZeroParamType"),
    "unwrap_model_for_generation": differs(
        "checkpoint.parameters:unwrap_model_for_generation", "yields the model: generate() works"
    ),
    "DeepSpeedZeRoOffload": absent("parameters are sharded by initialize; use zero.Init and deepspeed.initialize"),
    "TiledLinear": ours("tensor.tiled:TiledLinear"),
    "TiledLinearReturnBias": ours("tensor.tiled:TiledLinearReturnBias"),
}

_ESTIMATES = {
    stage: {
        name: works(f"deeptide.zero:{name}")
        for form in ("", "_all_cold", "_all_live")
        for name in (f"estimate_zero{stage}_model_states_mem_needs{form}",)
    }
    for stage in (2, 3)
}

_OPTIMIZERS = {
    "adam": {
        "FusedAdam": ours("training.optimizers:FusedAdam"),
        "DeepSpeedCPUAdam": ours("training.optimizers:DeepSpeedCPUAdam"),
        "ZenFlowCPUAdam": absent(_ZENFLOW),
        "ZenFlowSelectiveAdamW": absent(_ZENFLOW),
    },
    "adagrad": {"DeepSpeedCPUAdagrad": ours("training.optimizers:DeepSpeedCPUAdagrad")},
    "lion": {
        "DeepSpeedCPULion": ours("training.optimizers:DeepSpeedCPULion"),
        "FusedLion": ours("training.optimizers:FusedLion"),
    },
    "lamb": {"FusedLamb": ours("training.optimizers:FusedLamb")},
}

_FP32 = {
    name: ours(f"checkpoint.consolidate:{name}")
    for name in (
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    )
} | {
    name: differs(f"checkpoint.consolidate:{name}", "of a folder that DeepSpeed itself wrote; ours has no such files")
    for name in ("get_checkpoint_files", "get_model_state_file", "get_model_state_files", "get_optim_files")
}

_PIPE_NAMES = {
    "PipelineModule": differs("deeptide.pipeline:PipelineModule", _PIPE_MODULE),
    "LayerSpec": works("deeptide.pipeline:LayerSpec"),
    "TiedLayerSpec": differs(
        "deeptide.pipeline:TiedLayerSpec", "all of the layer's parameters are tied, and the first stage owns them"
    ),
    "DualPipeVModule": absent(_DUAL),
}

_TOP = {
    "__version__": ours("versions:version"),
    "__version_major__": ours("versions:major"),
    "__version_minor__": ours("versions:minor"),
    "__version_patch__": ours("versions:patch"),
    "__git_hash__": ours("versions:git_hash"),
    "__git_branch__": ours("versions:git_branch"),
    "version": ours("versions:version"),
    "git_hash": ours("versions:git_hash"),
    "git_branch": ours("versions:git_branch"),
    "HAS_TRITON": ours("versions:has_triton"),
    "initialize": ours("initialize:initialize"),
    "init_distributed": ours("initialize:init_distributed"),
    "add_config_arguments": works("deeptide._process.arguments:add_config_arguments"),
    "add_tuning_arguments": works("deeptide._process.arguments:add_tuning_arguments"),
    "DeepSpeedEngine": ours("engine:DeepSpeedEngine"),
    "DeepSpeedOptimizer": ours("training.optimizers:DeepSpeedOptimizer"),
    "DeepSpeedOptimizerCallable": ours("training.optimizers:DeepSpeedOptimizerCallable"),
    "DeepSpeedSchedulerCallable": ours("training.optimizers:DeepSpeedSchedulerCallable"),
    "DeepSpeedConfig": differs(
        "config.configuration:DeepSpeedConfig", "the keys that this page and docs/config.md name"
    ),
    "DeepSpeedConfigError": works("deeptide._C:ConfigError"),
    "DeepSpeedDataLoader": ours("helpers.loader:DeepSpeedDataLoader"),
    "OnDevice": differs("checkpoint.parameters:OnDevice", "torch.device and torch.set_default_dtype"),
    "get_accelerator": works("deeptide.accelerator:get_accelerator"),
    "log_dist": ours("helpers.logging:log_dist"),
    "logger": ours("helpers.logging:logger"),
    "TORCH_DISTRIBUTED_DEFAULT_PORT": works("deeptide._C:DEFAULT_PORT"),
    "init_inference": absent(_INFERENCE),
    "InferenceEngine": absent(_INFERENCE),
    "DeepSpeedInferenceConfig": absent(_INFERENCE),
    "default_inference_config": absent(_INFERENCE),
    "DeepSpeedHybridEngine": absent(_HYBRID),
    "PipelineEngine": differs("pipe.engine:PipelineEngine", _PIPE_ENGINE),
    "PipelineModule": _PIPE_NAMES["PipelineModule"],
    "DualPipeVEngine": absent(_DUAL),
    "DualPipeVModule": absent(_DUAL),
    "tp_model_init": differs("tensor.tensor_parallel:tp_model_init", _TENSOR),
    "set_autotp_mode": differs("tensor.tensor_parallel:set_autotp_mode", "has no effect: initialize cuts layers"),
    "replace_transformer_layer": absent(_INFERENCE),
    "revert_transformer_layer": absent(_INFERENCE),
    "DeepSpeedTransformerLayer": differs("deeptide.ops.transformer:DeepSpeedTransformerLayer", _LAYER),
    "DeepSpeedTransformerConfig": differs("deeptide.ops.transformer:DeepSpeedTransformerConfig", _LAYER),
}

_UTILS = {
    **_LOGGING,
    **_STATE_FUNCTIONS,
    **{name: differs(f"helpers.small:{name}", _LEAVES) for name in ("set_z3_leaf_modules", "unset_z3_leaf_modules")},
    **{name: differs(f"helpers.small:{name}", _LEAVES) for name in ("set_z3_leaf_module", "z3_leaf_module")},
    **{name: differs(f"helpers.small:{name}", _LEAVES) for name in ("get_z3_leaf_modules", "z3_leaf_parameter")},
    "RepeatingLoader": works("deeptide.data:RepeatingLoader"),
    "OnDevice": _TOP["OnDevice"],
    "instrument_w_nvtx": differs("helpers.small:instrument_w_nvtx", "returns the function"),
    "is_initialized": torchs("distributed:is_initialized"),
    "recursive_getattr": ours("helpers.small:recursive_getattr"),
    "recursive_setattr": ours("helpers.small:recursive_setattr"),
    "get_numactl_cmd": absent("`deeptide --bind_cores_to_rank` shares cores out"),
}

MODULES: dict[str, dict[str, Name]] = {
    "deepspeed": _TOP,
    "deepspeed.accelerator": {
        "get_accelerator": _TOP["get_accelerator"],
        "is_current_accelerator_supported": works("deeptide.accelerator:is_current_accelerator_supported"),
        "DeepSpeedAccelerator": works("deeptide.accelerator:Accelerator"),
        "set_accelerator": absent("the environment variable DS_ACCELERATOR chooses cpu or cuda"),
    },
    "deepspeed.checkpoint.utils": {
        "clone_tensors_for_torch_save": ours("helpers.small:clone_tensors_for_torch_save"),
        "get_model_ckpt_name_for_rank": absent("a checkpoint here is safetensors files and a manifest"),
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint": absent("deeptide.load_checkpoint reads checkpoints of any world into any other"),
        "universal_checkpoint_info": absent("every checkpoint here is universal: any world loads it"),
    },
    "deepspeed.comm": {
        **{name: torchs(f"distributed:{name}") for name in _COMM},
        **{name: works(f"deeptide.comm:{name}") for name in _COMM_OURS},
        "init_distributed": _TOP["init_distributed"],
        "log_summary": differs("deeptide.comm:log_summary", "of the engines' collectives, not of the program's own"),
        "configure": differs(
            "deeptide.comm:configure", 'says so: the section "comms_logger" of the configuration does'
        ),
    },
    "deepspeed.compression.helper": {
        "recursive_getattr": _UTILS["recursive_getattr"],
        "recursive_setattr": _UTILS["recursive_setattr"],
    },
    "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": _TOP["TORCH_DISTRIBUTED_DEFAULT_PORT"]},
    "deepspeed.elasticity": {
        "compute_elastic_config": works("deeptide.elasticity:compute_elastic_config"),
        "elasticity_enabled": works("deeptide.elasticity:elasticity_enabled"),
    },
    "deepspeed.env_report": {"main": ours("commands:print_report"), "cli_main": ours("commands:print_report")},
    "deepspeed.git_version_info": {
        "version": _TOP["version"],
        "git_hash": _TOP["git_hash"],
        "git_branch": _TOP["git_branch"],
        "torch_info": ours("versions:torch_info"),
        "installed_ops": ours("versions:installed_ops"),
        "compatible_ops": ours("versions:installed_ops"),
    },
    "deepspeed.inference.engine": {"InferenceEngine": absent(_INFERENCE)},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": ours("commands:ENVIRONMENT_FILE"),
        "main": differs("commands:main", "starts `deeptide --as-deepspeed`, whose options are DeepSpeed's"),
    },
    "deepspeed.module_inject": {"replace_transformer_layer": _TOP["replace_transformer_layer"]},
    "deepspeed.moe.utils": {
        "is_moe_param": ours("helpers.small:is_moe_param"),
        "has_moe_layers": ours("helpers.small:has_moe_layers"),
        **{
            name: differs(f"helpers.small:{name}", "no parameter is an expert's")
            for name in (
                "configure_moe_param_groups",
                "is_moe_param_group",
                "split_params_grads_into_shared_and_expert_params",
                "split_params_into_different_moe_groups_for_optimizer",
            )
        },
    },
    "deepspeed.ops": {},
    **{f"deepspeed.ops.{name}": entries for name, entries in _OPTIMIZERS.items()},
    "deepspeed.ops.transformer": {
        "DeepSpeedTransformerLayer": differs("deeptide.ops.transformer:DeepSpeedTransformerLayer", _LAYER),
        "DeepSpeedTransformerConfig": differs("deeptide.ops.transformer:DeepSpeedTransformerConfig", _LAYER),
    },
    "deepspeed.pipe": _PIPE_NAMES,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer": _TOP["DeepSpeedOptimizer"],
        "ZeROOptimizer": ours("training.optimizers:ZeROOptimizer"),
    },
    "deepspeed.runtime.compiler": {
        "is_compile_supported": ours("helpers.small:is_compile_supported"),
        "disable": ours("helpers.small:disable_compile"),
    },
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": _TOP["DeepSpeedConfig"],
        "DeepSpeedConfigError": _TOP["DeepSpeedConfigError"],
        **{
            name: ours(f"config.configuration:{name}")
            for name in (
                "ADAGRAD_OPTIMIZER",
                "ADAMW_OPTIMIZER",
                "ADAM_OPTIMIZER",
                "LAMB_OPTIMIZER",
                "LION_OPTIMIZER",
                "ONEBIT_ADAM_OPTIMIZER",
                "ONEBIT_LAMB_OPTIMIZER",
                "SGD_OPTIMIZER",
                "ZERO_ONE_ADAM_OPTIMIZER",
            )
        },
    },
    "deepspeed.runtime.config_utils": {
        "DeepSpeedConfigModel": differs(
            "config.model:DeepSpeedConfigModel", "for sections of a program's own, by pydantic, which must be installed"
        ),
    },
    "deepspeed.runtime.dataloader": {
        "DeepSpeedDataLoader": _TOP["DeepSpeedDataLoader"],
        "RepeatingLoader": _UTILS["RepeatingLoader"],
    },
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine": _TOP["DeepSpeedEngine"],
        "DeepSpeedOptimizerCallable": _TOP["DeepSpeedOptimizerCallable"],
        "DeepSpeedSchedulerCallable": _TOP["DeepSpeedSchedulerCallable"],
    },
    "deepspeed.runtime.hybrid_engine": {"DeepSpeedHybridEngine": absent(_HYBRID)},
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.pipe": {**_PIPE_NAMES, "ProcessTopology": ours("pipe.topology:ProcessTopology")},
    "deepspeed.runtime.pipe.engine": {
        "PipelineEngine": _TOP["PipelineEngine"],
        "PipelineError": works("deeptide.pipeline.engine:PipelineError"),
    },
    "deepspeed.runtime.pipe.module": _PIPE_NAMES,
    "deepspeed.runtime.utils": {
        "see_memory_usage": ours("helpers.small:see_memory_usage"),
        "set_random_seed": ours("helpers.small:set_random_seed"),
        "required_torch_version": ours("versions:required_torch_version"),
    },
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {
        "ZeroStageEnum": ours("config.configuration:ZeroStageEnum"),
        "DeepSpeedZeroConfig": ours("config.zero:DeepSpeedZeroConfig"),
        "get_zero_config": ours("config.zero:get_zero_config"),
        "read_zero_config_deprecated": absent("write a section for zero_optimization, not a boolean"),
    },
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": ours("config.configuration:OffloadDeviceEnum"),
        "OffloadStateTypeEnum": ours("config.configuration:OffloadStateTypeEnum"),
        "DeepSpeedZeroOffloadOptimizerConfig": ours("config.zero:DeepSpeedZeroOffloadOptimizerConfig"),
        "DeepSpeedZeroOffloadParamConfig": ours("config.zero:DeepSpeedZeroOffloadParamConfig"),
    },
    "deepspeed.runtime.zero.partition_parameters": {
        **{name: _ZERO[name] for name in ("Init", "GatheredParameters", "ZeroParamStatus", "ZeroParamType")},
        "register_external_parameter": _ZERO["register_external_parameter"],
        "get_accelerator": _TOP["get_accelerator"],
        "_contradicting_single_rank_pg_error": ours("checkpoint.parameters:_contradicting_single_rank_pg_error"),
        "zero_wrapper_for_fp_tensor_constructor": differs(
            "checkpoint.parameters:unchanged_constructor", "returns the constructor"
        ),
        **{
            f"_orig_torch_{name}": torchs(f":{name}")
            for name in ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros")
        },
    },
    "deepspeed.runtime.zenflow.zenflow_config": {"ZenFlowConfig": absent(_ZENFLOW)},
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": ours("training.optimizers:DeepSpeedZeroOptimizer_Stage3"),
        "unwrap_model_for_generation": _ZERO["unwrap_model_for_generation"],
        **_ESTIMATES[3],
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": ours("training.optimizers:DeepSpeedZeroOptimizer"),
        **_ESTIMATES[2],
    },
    "deepspeed.runtime.zero.utils": {
        "is_zero_param": ours("checkpoint.parameters:is_zero_param"),
        "is_zero_supported_optimizer": ours("training.optimizers:is_zero_supported_optimizer"),
    },
    "deepspeed.utils": _UTILS,
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.logging": _LOGGING,
    "deepspeed.utils.nvtx": {"instrument_w_nvtx": _UTILS["instrument_w_nvtx"]},
    "deepspeed.utils.tensor_fragment": _STATE_FUNCTIONS,
    "deepspeed.utils.zero_to_fp32": _FP32,
}
for _module, _names in (*HELPERS.items(), *FEATURES.items()):
    MODULES[_module] = {**_names, **MODULES.get(_module, {})}

# Other paths of the same modules.
ALIASES = {
    **ALIASES_OF_HELPERS,
    **ALIASES_OF_FEATURES,
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.ops.lion.cpu_lion": "deepspeed.ops.lion",
    "deepspeed.ops.lion.fused_lion": "deepspeed.ops.lion",
    "deepspeed.ops.lamb.fused_lamb": "deepspeed.ops.lamb",
    "deepspeed.ops.adagrad.cpu_adagrad": "deepspeed.ops.adagrad",
    "deepspeed.runtime.zero.parameter_offload": "deepspeed.runtime.zero",
    "deepspeed.utils.init_on_device": "deepspeed.utils",
    "deepspeed.utils.z3_leaf_module": "deepspeed.utils",
    "deepspeed.zero": "deepspeed.runtime.zero",
}

_OWN_COLLECTIVES = (
    "allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback clip_fp32_gradients "
    "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"
)
_DEEP_COMPILE = (
    "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend "
    "get_compile_time get_deepcompile_backend get_deepspeed_compile_backend"
)
# Methods and attributes of DeepSpeed's engine that this one does not have; the others are its methods.
ENGINE: dict[str, str] = {
    **dict.fromkeys(_OWN_COLLECTIVES.split(), "engine.step() reduces, clips and steps; deepspeed.comm has collectives"),
    **dict.fromkeys(_DEEP_COMPILE.split(), "there is no DeepCompile; engine.compile() compiles the model"),
    "checkpoint_engine": "save_checkpoint and load_checkpoint are the whole interface to checkpoints",
    "engine_timers": "`deeptide top` and reports have the times of steps; engine.tput_timer has samples per second",
    "load_moe_state_dict": _MOE,
    "losses": "keep the losses that engine() returns",
    "summary_events": "engine.monitor writes them; deepspeed.monitor has the classes",
    "allreduce_gradients": "gradients are reduced by engine.step()",
    "register_compile_pass": "there is no DeepCompile; engine.compile() compiles the model",
    "get_sequence_parallel_group": _SEQUENCE,
}
