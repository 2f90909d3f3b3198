# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Asks the interface's engine about its configuration: for each question, the default and another answer."""

import os
import sys

import models
import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface

# Has no key's default, and no number twice: an answer from another key is another answer.
EIGENVALUE = {
    "enabled": True,
    "verbose": True,
    "max_iter": 31,
    "tol": 0.32,
    "stability": 0.33,
    "gas_boundary_resolution": 34,
    "layer_name": "layers",
    "layer_num": 35,
}
PROFILER = {
    "enabled": True,
    "recompute_fwd_factor": 0.41,
    "profile_step": 42,
    "module_depth": 43,
    "top_modules": 44,
    "detailed": False,
    "output_file": "profile.txt",
}
SAMPLING = {"enabled": True, "curriculum_learning": {"enabled": True, "data_cluster_path": "clusters"}}
LTD = {"enabled": True, "total_layer_num": 51}
EFFICIENCY = {"enabled": True, "data_sampling": SAMPLING, "data_routing": {"random_ltd": LTD}}
CURRICULUM = {"enabled": True, "curriculum_type": "seqlen"}
DEPTH = {"enabled": True, "theta": 0.61, "gamma": 0.62}
ZERO = {
    "stage": 2,
    "allgather_bucket_size": 71,
    "allgather_partitions": False,
    "allgather_sequential": True,
    "compute_grad_norm": False,
    "contiguous_gradients": False,
    "elastic_checkpoint": True,
    "enable_sanity_checks": True,
    "ignore_unused_parameters": False,
    "legacy_stage1": True,
    "load_from_fp32_weights": False,
    "log_trace_cache_warnings": True,
    "mics_shard_size": 72,
    "offload_optimizer": {"device": "cpu", "buffer_count": 73, "cpuadam_cores_perc": 0.74, "super_offload": True},
    "offload_param": {"device": "nvme", "nvme_path": "folder", "buffer_size": 75},
    "overlap_comm": True,
    "parameter_alignment": True,
    "reduce_bucket_size": 76,
    "reduce_scatter": False,
    "round_robin_gradients": True,
    "save_muon_momentum_buffer_in_memory": True,
    "stage3_max_live_parameters": 77,
    "stage3_max_reuse_distance": 78,
    "stage3_model_persistence_threshold": 79,
    "stage3_module_granularity_threshold": 80,
    "stage3_param_persistence_threshold": 81,
    "stage3_prefetch_bucket_size": 82,
    "sub_group_size": 83,
    "use_multi_rank_bucket_allreduce": False,
    "zero_hpz_partition_size": 84,
    "zero_quantized_gradients": True,
    "zero_quantized_nontrainable_weights": True,
    "zero_quantized_weights": True,
    "zenflow": {"topk_ratio": 0.85},
}
TUNING = {
    "enabled": True,
    "end_profile_step": 86,
    "metric": "latency",
    "metric_path": "metric.json",
    "model_info": {"profile": True},
    "model_info_path": "info.json",
    "start_profile_step": 87,
}
WRITER = {"type": "fast"}
SAFE = ["torch.nn.Linear"]
GIVEN = {
    "aio": {"block_size": 91},
    "amp": {"enabled": True},
    "autotuning": TUNING,
    "checkpoint": {
        "load_universal": True,
        "use_node_local_storage": True,
        "checkpoint_serialization": False,
        "writer": WRITER,
    },
    "compile": {"deepcompile": True},
    "curriculum_learning": CURRICULUM,
    "data_efficiency": EFFICIENCY,
    "elasticity": {"enabled": True},
    "flops_profiler": PROFILER,
    "gradient_predivide_factor": 9.2,
    "graph_harvesting": True,
    "log_level": "warning",
    "memory_breakdown": True,
    "optimizer": {"legacy_fusion": True},
    "progressive_layer_drop": DEPTH,
    "quantize_training": {"enabled": True, "eigenvalue": EIGENVALUE},
    "tensor_parallel": {"autotp_size": 88},
    "torch_autocast": {"enabled": True, "lower_precision_safe_modules": SAFE},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": ZERO,
}
# {question: (the answer for an empty configuration, that for GIVEN)}
ANSWERS = {
    "aio_config": (None, {"block_size": 91}),
    "amp_enabled": (False, True),
    "autotuning_enabled": (False, True),
    "autotuning_end_profile_step": (5, 86),
    "autotuning_metric": ("throughput", "latency"),
    "autotuning_metric_path": (os.path.join(os.getcwd(), "autotuning_metric.json"), "metric.json"),
    "autotuning_model_info": (None, {"profile": True}),
    "autotuning_model_info_path": (os.path.join(os.getcwd(), "autotuning_model_info.json"), "info.json"),
    "autotuning_profile_model_info": (False, True),
    "autotuning_start_profile_step": (3, 87),
    "checkpoint_serialization_enabled": (True, False),
    "checkpoint_writer_enabled": (False, True),
    "cpuadam_cores_perc": (0.9, 0.74),
    "curriculum_enabled_legacy": (False, True),
    "curriculum_learning_config": (None, SAMPLING["curriculum_learning"]),
    "curriculum_learning_enabled": (False, True),
    "curriculum_params_legacy": (None, CURRICULUM),
    "data_efficiency_config": (None, EFFICIENCY),
    "data_efficiency_enabled": (False, True),
    "data_sampling_config": (None, SAMPLING),
    "data_sampling_enabled": (False, True),
    "eigenvalue_enabled": (False, True),
    "eigenvalue_gas_boundary_resolution": (1, 34),
    "eigenvalue_layer_name": ("bert.encoder.layer", "layers"),
    "eigenvalue_layer_num": (0, 35),
    "eigenvalue_max_iter": (100, 31),
    "eigenvalue_stability": (1e-6, 0.33),
    "eigenvalue_tol": (1e-2, 0.32),
    "eigenvalue_verbose": (False, True),
    "elasticity_enabled": (False, True),
    "flops_profiler_detailed": (True, False),
    "flops_profiler_enabled": (False, True),
    "flops_profiler_module_depth": (-1, 43),
    "flops_profiler_output_file": (None, "profile.txt"),
    "flops_profiler_profile_step": (1, 42),
    "flops_profiler_recompute_fwd_factor": (0.0, 0.41),
    "flops_profiler_top_modules": (1, 44),
    "gradient_predivide_factor": (1.0, 9.2),
    "graph_harvesting": (False, True),
    "is_deepcompile_enabled": (False, True),
    "is_sanity_checks_enabled": (False, True),
    "load_universal_checkpoint": (False, True),
    "log_level": (None, "warning"),
    "memory_breakdown": (False, True),
    "mics_shard_size": (-1, 72),
    "optimizer_legacy_fusion": (False, True),
    "pld_enabled": (False, True),
    "pld_gamma": (0.001, 0.62),
    "pld_params": (None, DEPTH),
    "pld_theta": (1.0, 0.61),
    "quantize_training": (False, True),
    "random_ltd_config": (None, LTD),
    "random_ltd_enabled": (False, True),
    "super_offload": (False, True),
    "swap_tensor_config": (None, {"block_size": 91}),
    "tensor_parallel_config": (None, {"autotp_size": 88}),
    "torch_autocast_lower_precision_safe_modules": (None, SAFE),
    "use_node_local_storage": (False, True),
    "zenflow_config": (None, {"topk_ratio": 0.85}),
    "zero_allgather_bucket_size": (500_000_000, 71),
    "zero_allgather_partitions": (True, False),
    "zero_allgather_sequential": (False, True),
    "zero_allow_untested_optimizer": (False, True),
    "zero_compute_grad_norm": (True, False),
    "zero_contiguous_gradients": (True, False),
    "zero_elastic_checkpoint": (False, True),
    "zero_force_ds_cpu_optimizer": (True, False),
    "zero_hpz_partition_size": (1, 84),
    "zero_ignore_unused_parameters": (True, False),
    "zero_legacy_stage1": (False, True),
    "zero_load_from_fp32_weights": (True, False),
    "zero_log_trace_cache_warnings": (False, True),
    "zero_max_live_parameters": (1_000_000_000, 77),
    "zero_max_reuse_distance": (1_000_000_000, 78),
    "zero_model_persistence_threshold": (sys.maxsize, 79),
    "zero_module_granularity_threshold": (0, 80),
    "zero_multi_rank_bucket_allreduce": (True, False),
    "zero_overlap_comm": (False, True),
    "zero_param_persistence_threshold": (100_000, 81),
    "zero_parameter_alignment": (False, True),
    "zero_prefetch_bucket_size": (50_000_000, 82),
    "zero_quantized_gradients": (False, True),
    "zero_quantized_nontrainable_weights": (False, True),
    "zero_quantized_weights": (False, True),
    "zero_reduce_bucket_size": (500_000_000, 76),
    "zero_reduce_scatter": (True, False),
    "zero_round_robin_gradients": (False, True),
    "zero_save_muon_momentum_buffer_in_memory": (False, True),
    "zero_sub_group_size": (1_000_000_000, 83),
}
# The values of a section are those that are given, and else DeepSpeed's.
SECTIONS = {
    "zero_offload_optimizer": {
        "device": "cpu",
        "nvme_path": None,
        "buffer_count": 73,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": True,
        "cpuadam_cores_perc": 0.74,
    },
    "zero_offload_param": {
        "device": "nvme",
        "nvme_path": "folder",
        "buffer_count": 5,
        "buffer_size": 75,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    },
}


def check_answers():
    from deeptide.as_deepspeed._answers import KEYS, EngineAnswers, answer
    from deeptide.as_deepspeed._answers import ZERO as OF_ZERO

    assert set(ANSWERS) | set(SECTIONS) == set(KEYS) | set(OF_ZERO), "each question has a row here"
    for name, (default, given) in ANSWERS.items():
        assert default != given, name
        for config, expected in (({}, default), (GIVEN, given)):
            found = answer(name, config)
            assert (type(found), found) == (type(expected), expected), name
    for name, expected in SECTIONS.items():
        assert answer(name, {}) is None
        assert answer(name, GIVEN).model_dump() == expected, name
    asked = {name for name in vars(EngineAnswers) if name[:1] != "_"}
    assert asked - ELSEWHERE == set(PLAIN) == {name for _, others in ENGINES.values() for name in others}


def test_each_key_of_the_configuration_is_answered_with_its_value():
    run_processes(1, check_answers)


# The loss, parameters of optimizers, ranks and sizes of a mesh.
ELSEWHERE = {
    "dp_world_size",
    "get_data_parallel_rank",
    "get_model_parallel_rank",
    "get_tensor_parallel_rank",
    "mp_world_size",
    "optimizer_params",
    "scale",
}
PLAIN = {
    "amp_params": {},
    "bf16_master_weights_and_gradients": False,
    "bf16_optimizer_states": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": False,
    "communication_data_type": torch.float32,
    "dataloader_drop_last": False,
    "dump_state": False,
    "fp16_master_weights_and_gradients": False,
    "get_type": ["adamw"],
    "initial_dynamic_scale": 65536.0,
    "optimizer_name": "adamw",
    "postscale_gradients": True,
    "scheduler_name": None,
    "scheduler_params": None,
    "sparse_gradients_enabled": False,
    "sparse_tensor_module_names": set(),
    "wall_clock_breakdown": False,
    "zero_cpu_offload": False,
    "zero_has_nvme_offload": False,
    "zero_nvme_offload_optimizer": False,
    "zero_optimization_partition_gradients": False,
    "zero_optimization_partition_weights": False,
    "zero_partial_offload": 1.0,
    "zero_use_cpu_optimizer": False,
}
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
FP16 = {"enabled": True, "initial_scale_power": 6, "fp16_master_weights_and_grads": True}
# {which: (sections in the place of those of models.config, the answers that are not those of PLAIN)}
ENGINES = {
    "none": ({}, {}),
    "states in files": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}},
        {"zero_has_nvme_offload": True, "zero_nvme_offload_optimizer": True, "zero_use_cpu_optimizer": True},
    ),
    "parameters in files": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "FOLDER"}}},
        {
            "zero_has_nvme_offload": True,
            "zero_optimization_partition_gradients": True,
            "zero_optimization_partition_weights": True,
        },
    ),
    "states on the CPU": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}, "fp16": FP16},
        {
            "communication_data_type": torch.float16,
            "fp16_master_weights_and_gradients": True,
            "initial_dynamic_scale": 64.0,
            "zero_cpu_offload": True,
            "zero_optimization_partition_gradients": True,
            "zero_partial_offload": 0.4,
            "zero_use_cpu_optimizer": True,
        },
    ),
    "bf16": (
        {"bf16": BF16, "checkpoint": {"tag_validation": "Ignore"}},
        {
            "bf16_master_weights_and_gradients": True,
            "checkpoint_tag_validation_enabled": False,
            "communication_data_type": torch.bfloat16,
        },
    ),
    "moments in bf16": (
        {"bf16": {**BF16, "bf16_optimizer_states": True}, "communication_data_type": "fp32"},
        {"bf16_master_weights_and_gradients": True, "bf16_optimizer_states": True},
    ),
    "others": (
        {
            "amp": {"enabled": False, "opt_level": "O1"},
            "checkpoint": {"tag_validation": "Fail"},
            "communication_data_type": "bf16",
            "dataloader_drop_last": True,
            "dump_state": True,
            "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
            "prescale_gradients": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
            "sparse_gradients": True,
            "wall_clock_breakdown": True,
        },
        {
            "amp_params": {"opt_level": "O1"},
            "checkpoint_tag_validation_fail": True,
            "communication_data_type": torch.bfloat16,
            "dataloader_drop_last": True,
            "dump_state": True,
            "get_type": ["lion"],
            "optimizer_name": "lion",
            "postscale_gradients": False,
            "scheduler_name": "WarmupLR",
            "scheduler_params": {"warmup_num_steps": 3},
            "sparse_gradients_enabled": True,
            "sparse_tensor_module_names": {"embed.weight"},
            "wall_clock_breakdown": True,
        },
    ),
}


def check_engine(which, folder):
    deepspeed = interface()
    sections, others = ENGINES[which]
    config = {**models.config(0), **sections}
    for place in config["zero_optimization"].values():
        if isinstance(place, dict) and "nvme_path" in place:
            place["nvme_path"] = folder
    engine = deepspeed.initialize(model=models.make_model(), config=config)[0]
    for name, expected in {**PLAIN, **others}.items():
        found = getattr(engine, name)
        found = found() if callable(found) else found
        assert (type(found), found) == (type(expected), expected), name
    params = {"lr": 1e-3} if which == "others" else models.config(0)["optimizer"]["params"]
    assert engine.optimizer_params() == params
    for asked, section in (
        (engine.zero_offload_optimizer(), "offload_optimizer"),
        (engine.zero_offload_param(), "offload_param"),
    ):
        device = config["zero_optimization"].get(section, {}).get("device")
        assert (None if asked is None else asked.device) == device


@pytest.mark.parametrize("which", ENGINES)
def test_an_engine_answers_as_its_configuration_says(which, tmp_path):
    run_processes(1, check_engine, which, str(tmp_path))
