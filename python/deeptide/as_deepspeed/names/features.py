# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the list of names whose features are not here: each may be imported, and its use is an error."""

from __future__ import annotations

from deeptide.as_deepspeed.names.entries import Name, absent, differs, ours, works

_PIPE = "no rank's activations are cut up; a PipelineModule's stages exchange whole tensors"
_MOE = "there is no expert parallelism yet; MoE layers of transformers work with ZeRO as they are"
_SEQUENCE = "there is no sequence parallelism yet; use gradient checkpointing for long sequences"
_TENSOR = "layers that ranks share are deeptide.tensor's; parallel.tensor cuts models as they are"
_INFERENCE = "there is no inference engine; the model's own generate() works, also between steps"
_MOQ = 'weights are quantised by the section "compression_training", which init_compression prepares'
_PROFILER = 'the configuration\'s section "flops_profiler" is read by the engine; FlopsProfiler takes arguments'
_AUTOTUNE = "the search is a command: deeptide tune, or deepspeed --autotuning tune"
_FILES = 'transfers to files are the engine\'s own: offload_optimizer and offload_param with "device": "nvme"'
_GATE = "parameters stay torch's own: the engine gathers a parameter when an operator uses it, and nothing hooks it"
_LINEAR = "use peft's LoRA"
_SNIP = "DeepSpeed handed snip_momentum to a package that was never published; use the method topk or l1"
_PREPARED = "init_compression prepares layers in place, and redundancy_clean makes them final"
_LOADED = "load_checkpoint reads DeepSpeed's checkpoints and Deeptide's into any world as they are"

# (module, reason, names)
_ROWS = (
    ("autotuning", _AUTOTUNE, "Autotuner"),
    ("autotuning.autotuner", _AUTOTUNE, "Autotuner run_autotuning"),
    ("checkpoint.ds_to_universal", _LOADED, "main convert_to_universal"),
    ("checkpoint.deepspeed_checkpoint", _LOADED, "DeepSpeedCheckpoint"),
    ("checkpoint.universal_checkpoint", _LOADED, "load_hp_checkpoint_state enable_universal_checkpoint"),
    ("checkpoint.reshape_utils", _LOADED, "merge_state partition_data get_files"),
    ("comm.torch", "torch.distributed is used as it is", "TorchBackend"),
    (
        "comm",
        "init_distributed reads MPI's, SLURM's, Azure's and SageMaker's variables itself",
        "in_aml in_aws_sm in_dlts mpi_discovery patch_aml_env_for_torch_nccl_backend",
    ),
    ("compression.basic_layer", _TENSOR, "ColumnParallelLinear_Compress RowParallelLinear_Compress"),
    ("compression.basic_layer", "a BatchNorm2d stays torch's own, also where it shrinks", "BNLayer_Compress"),
    ("compression.compress", _PREPARED, "get_compress_methods get_module_name"),
    ("compression.helper", _PREPARED, "compression_preparation fix_compression module_replacement"),
    ("compression.helper", _SNIP, "generate_pruners register_on_step_begin rewrite_optimizer_step"),
    ("inference", _INFERENCE, "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine"),
    ("inference.config", _INFERENCE, "DeepSpeedInferenceConfig DeepSpeedTPConfig"),
    ("io", _FILES, "FastFileWriter PyFileWriter MockFileWriter"),
    ("linear", _LINEAR, "LoRAConfig OptimizedLinear QuantizationConfig init_lora"),
    ("linear.config", _LINEAR, "LoRAConfig QuantizationConfig"),
    ("linear.optimized_linear", _LINEAR, "LoRAOptimizedLinear OptimizedLinear"),
    ("linear.quantization", _LINEAR, "QuantizedLinear QuantizedParameter"),
    ("model_implementations", _INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    ("module_inject", _INFERENCE, "replace_transformer_layer revert_transformer_layer HFBertLayerPolicy"),
    ("module_inject.layers", _TENSOR, "LinearAllreduce LinearLayer set_autotp_mode"),
    ("module_inject.auto_tp", _TENSOR, "AutoTP"),
    ("moe.experts", _MOE, "Experts"),
    ("moe.layer", _MOE, "MoE"),
    ("moe.mappings", _MOE, "drop_tokens gather_tokens"),
    ("moe.sharded_moe", _MOE, "MOELayer TopKGate top1gating top2gating topkgating"),
    ("ops.aio", _FILES, "aio_handle"),
    ("ops.quantizer", _MOQ, "ds_quantizer"),
    ("ops.transformer", _INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    ("profiling.config", _PROFILER, "DeepSpeedFlopsProfilerConfig"),
    ("runtime.domino.transformer", _TENSOR, "DominoTransformer DominoTransformerLayer"),
    (
        "runtime.activation_checkpointing.offload_activations",
        "torch.autograd.graph.save_on_cpu() keeps activations in the host's memory, as does cpu_checkpointing",
        "CheckpointHiddenStatesOffload get_checkpoint_hidden_states_offloading_ctx_manager",
    ),
    ("runtime.utils", _PIPE, "PartitionedTensor"),
    (
        "runtime.pipe.schedule",
        "a pipeline trains by parallel.schedule: 1f1b, gpipe, interleaved, zero_bubble",
        "CommitP2P DualPipeVSchedule",
    ),
    (
        "runtime.sequence_parallel.ulysses_sp",
        _SEQUENCE,
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    ),
    ("runtime.sparse_tensor", "gradients of embeddings travel without their zeros by sparse_gradients", "SparseTensor"),
    (
        "runtime.swap_tensor.partitioned_param_swapper",
        _FILES,
        "AsyncPartitionedParameterSwapper PartitionedParamStatus",
    ),
    ("runtime.tensor_parallel", _TENSOR, "TPTrainingConfig TpTrainingManager"),
    ("runtime.zero", _GATE, "ZeROOrderedDict ensure_zero_ordered_dict"),
    (
        "runtime.zero.partition_parameters",
        _GATE,
        "AllGatherCoalescedHandle AllGatherHandle CUDAQuantizer InsertPostInitMethodToModuleSubClasses "
        "MultipleAllGatherHandles NoGatherHandle free_param get_allgather_dtype partitioned_param_data_shape",
    ),
    ("runtime.zero", "there is no MiCS yet; use stage 3 or 2", "MiCS_Init"),
    (
        "runtime.zero.mics",
        "there is no MiCS yet; use stage 3 or 2",
        "MiCS_AllGatherCoalescedHandle MiCS_Init MiCS_Offload MiCS_Optimizer",
    ),
    ("sequence.auto_sp", _SEQUENCE, "auto_wrap_model_for_sp"),
    ("sequence.cross_entropy", _SEQUENCE, "vocab_sequence_parallel_cross_entropy"),
    ("sequence.fpdt_layer", _SEQUENCE, "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss"),
    ("sequence.layer", _SEQUENCE, "DistributedAttention single_all_to_all"),
    (
        "utils.comms_logging",
        'the section "comms_logger" logs the engine\'s collectives; deepspeed.comm.log_summary() prints them',
        "CommsLogger calc_bw_log get_caller_func",
    ),
    (
        "utils.groups",
        _MOE,
        "_create_expert_and_data_parallel _create_expert_data_and_model_parallel _create_model_parallel "
        "_get_expert_parallel_ranks _get_expert_parallel_group_dict _get_expert_data_parallel_group_dict",
    ),
    (
        "launcher.runner",
        "`deeptide` reads hostfiles and starts ranks; `deeptide --dry-run` prints what it makes of them",
        "parse_args run_autotuning",
    ),
    ("utils.numa", "`deeptide --bind_cores_to_rank` shares cores out", "get_numa_cores get_numactl_cmd"),
    ("utils.pin_memory", "memory that a device copies is pinned by the engine", "NativePinnedMemory"),
)

FEATURES: dict[str, dict[str, Name]] = {}
for _module, _reason, _words in _ROWS:
    FEATURES.setdefault(f"deepspeed.{_module}", {}).update({name: absent(_reason) for name in _words.split()})

# Names that work: where each is here.
_PIPELINE = "runtime.data_pipeline"
_WORKING = (
    (f"{_PIPELINE}.config", "as_deepspeed.training.data_pipeline", "get_data_efficiency_config"),
    (f"{_PIPELINE}.curriculum_scheduler", "as_deepspeed.training.data_pipeline", "CurriculumScheduler"),
    (f"{_PIPELINE}.data_routing.basic_layer", "efficiency.random_ltd", "RandomLayerTokenDrop"),
    (
        f"{_PIPELINE}.data_routing.helper",
        "efficiency.random_ltd",
        "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd",
    ),
    (f"{_PIPELINE}.data_routing.scheduler", "as_deepspeed.training.data_pipeline", "RandomLTDScheduler"),
    (f"{_PIPELINE}.data_sampling.data_analyzer", "efficiency.analyzer", "DataAnalyzer DistributedDataAnalyzer"),
    (f"{_PIPELINE}.data_sampling.data_sampler", "efficiency.loader", "DeepSpeedDataSampler"),
    (
        f"{_PIPELINE}.data_sampling.indexed_dataset",
        "efficiency.indexed_dataset",
        "MMapIndexedDataset MMapIndexedDatasetBuilder data_file_path index_file_path make_builder make_dataset "
        "valid_dtypes",
    ),
    (f"{_PIPELINE}.data_sampling.utils", "efficiency.indexed_dataset", "find_fit_int_dtype"),
    (f"{_PIPELINE}.data_sampling.utils", "efficiency.analyzer", "split_index"),
    (
        f"{_PIPELINE}.data_sampling.variable_batch_size_and_lr",
        "efficiency.variable_batches",
        "VariableBatchSizeLR batch_by_seqlens dataloader_for_variable_batch_size "
        "get_dataloader_and_lr_scheduler_for_variable_batch_size "
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed "
        "lr_scheduler_for_variable_batch_size scale_lr",
    ),
    (
        "ops.random_ltd",
        "efficiency.random_ltd",
        "GatherTokens ScatterTokens bert_sample_tokens gather_tokens gpt_sample_tokens scatter_tokens slice_attn_mask",
    ),
    (
        "runtime.pipe.schedule",
        "as_deepspeed.pipe.schedule",
        "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch "
        "OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation "
        "SendGrad TrainSchedule",
    ),
    (
        "runtime.pipe.topology",
        "as_deepspeed.pipe.topology",
        "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology _prime_factors",
    ),
    (
        "monitor.config",
        "as_deepspeed.config.monitor",
        "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config",
    ),
    ("sequence.layer", "as_deepspeed.helpers.rotary", "apply_rotary_pos_emb _rotate_half _torchembed_available"),
    ("compression.basic_layer", "as_deepspeed.training.compression", "QuantAct"),
    ("compression.helper", "as_deepspeed.training.compression", "is_module_compressible"),
    (
        "compression.utils",
        "as_deepspeed.training.compression",
        "AsymQuantizer BinaryQuantizer SymQuantizer TernaryQuantizer TopKBinarizer",
    ),
    ("runtime.eigenvalue", "compression.eigenvalue", "Eigenvalue"),
    ("runtime.quantize", "compression.quantizer", "Quantizer"),
    ("runtime.progressive_layer_drop", "as_deepspeed.training.data_pipeline", "ProgressiveLayerDrop"),
)
for _module, _home, _words in _WORKING:
    FEATURES.setdefault(f"deepspeed.{_module}", {}).update(
        {name: works(f"deeptide.{_home}:{name}") for name in _words.split()}
    )

_PREPARING = "init_compression student_initialization"
for _module, _words in (
    ("compression", "init_compression convert_conv1d_to_linear"),
    ("compression.compress", _PREPARING),
    ("compression.helper", "convert_conv1d_to_linear"),
):
    FEATURES.setdefault(f"deepspeed.{_module}", {}).update(
        {name: works(f"deeptide.compression.preparation:{name}") for name in _words.split()}
    )
for _module in ("compression", "compression.compress"):
    FEATURES[f"deepspeed.{_module}"]["redundancy_clean"] = differs(
        "deeptide.compression:redundancy_clean", "of an engine's model, cleans engine.snapshot()"
    )
FEATURES["deepspeed.compression.compress"]["check_deepspeed_config"] = ours("config.configuration:as_dict")
FEATURES["deepspeed.compression.basic_layer"].update(
    {
        name: differs(f"training.compression:{name}", "for isinstance; init_compression makes layers, in place")
        for name in ("Conv2dLayer_Compress", "Embedding_Compress", "LinearLayer_Compress")
    }
)
for _module in ("compression", "compression.scheduler"):
    FEATURES.setdefault(f"deepspeed.{_module}", {})["compression_scheduler"] = differs(
        "deeptide.compression:CompressionSchedule", "takes ds_config; the engine has its own"
    )
FEATURES.setdefault("deepspeed.runtime.tensor_parallel.config", {})["_get_hf_tp_plan"] = ours(
    "tensor.layer_specs:_get_hf_tp_plan"
)
_SPECS = "data alone: partition_config takes the specs as dictionaries, and initialize reads a model's plan by itself"
for _module, _words in (
    ("module_inject.autotp_config", "AutoTPConfig PartitionType TPLayerSpec"),
    ("module_inject.tp_plan_converter", "TPPlanConverter"),
):
    FEATURES.setdefault(f"deepspeed.{_module}", {}).update(
        {name: differs(f"tensor.layer_specs:{name}", _SPECS) for name in _words.split()}
    )

ALIASES_OF_FEATURES = {
    "deepspeed.ops.random_ltd.dropping_utils": "deepspeed.ops.random_ltd",
    "deepspeed.ops.sparse_attention.sparsity_config": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.sparse_attention.sparse_self_attention": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.sparse_attention.sparse_attention_utils": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.transformer.transformer": "deepspeed.ops.transformer",
}
