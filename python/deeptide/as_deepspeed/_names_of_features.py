# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the list of names whose features are not here: each may be imported, and its use is an error."""

from __future__ import annotations

from deeptide.as_deepspeed._entries import Name, absent

_PIPE = "there is no pipeline parallelism yet; train the model as one module, with ZeRO"
_MOE = "there is no expert parallelism yet; MoE layers of transformers work with ZeRO as they are"
_SEQUENCE = "there is no sequence parallelism yet; use gradient checkpointing for long sequences"
_TENSOR = "there is no tensor parallelism yet; ZeRO-3 shards parameters instead"
_INFERENCE = "there is no inference engine; the model's own generate() works, also between steps"
_DATA = "there is no curriculum of data yet; order the data set yourself"
_COMPRESSION = "there is no compression; quantise with torch.ao or peft"
_MONITOR = "there are no monitors yet; write engine.get_lr() and the like"
_PROFILER = "there is no profiler; use torch.profiler"
_AUTOTUNE = "there is no autotuning yet; change the configuration by hand"
_SPARSE = "use torch's flex_attention"
_PRECISION = "the engine itself keeps masters and the loss scale, of every optimizer"
_FILES = 'transfers to files are the engine\'s own: offload_optimizer and offload_param with "device": "nvme"'
_LINEAR = "use peft's LoRA"
_TILED = "tiled layers are not here; use gradient checkpointing for long sequences"
_DEPTH = "there is no progressive layer drop yet; leave layers out in the model's forward"
_LOADED = "checkpoints of DeepSpeed are not read yet; Deeptide's are read by any world as they are"

# (module, reason, names)
_ROWS = (
    ("autotuning", _AUTOTUNE, "Autotuner"),
    ("autotuning.autotuner", _AUTOTUNE, "Autotuner run_autotuning"),
    ("checkpoint.ds_to_universal", _LOADED, "main convert_to_universal"),
    ("checkpoint.deepspeed_checkpoint", _LOADED, "DeepSpeedCheckpoint"),
    ("checkpoint.universal_checkpoint", _LOADED, "load_hp_checkpoint_state enable_universal_checkpoint"),
    ("checkpoint.reshape_utils", _LOADED, "merge_state partition_data get_files"),
    ("comm.torch", "torch.distributed is used as it is", "TorchBackend"),
    ("compression", _COMPRESSION, "init_compression redundancy_clean"),
    ("compression.scheduler", _COMPRESSION, "compression_scheduler"),
    ("inference", _INFERENCE, "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine"),
    ("inference.config", _INFERENCE, "DeepSpeedInferenceConfig DeepSpeedTPConfig"),
    ("io", _FILES, "FastFileWriter PyFileWriter MockFileWriter"),
    ("linear", _LINEAR, "LoRAConfig OptimizedLinear QuantizationConfig init_lora"),
    ("model_implementations", _INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    ("module_inject", _INFERENCE, "replace_transformer_layer revert_transformer_layer HFBertLayerPolicy"),
    ("module_inject.layers", _TENSOR, "LinearAllreduce LinearLayer set_autotp_mode"),
    ("module_inject.auto_tp", _TENSOR, "AutoTP"),
    ("moe.experts", _MOE, "Experts"),
    ("moe.layer", _MOE, "MoE"),
    ("moe.mappings", _MOE, "drop_tokens gather_tokens"),
    ("moe.sharded_moe", _MOE, "MOELayer TopKGate top1gating top2gating topkgating"),
    ("moe.utils", _MOE, "is_moe_param_group configure_moe_param_groups"),
    ("monitor.config", _MONITOR, "DeepSpeedMonitorConfig get_monitor_config"),
    ("monitor.csv_monitor", _MONITOR, "csvMonitor"),
    ("monitor.monitor", _MONITOR, "Monitor MonitorMaster"),
    ("monitor.tensorboard", _MONITOR, "TensorBoardMonitor"),
    ("monitor.wandb", _MONITOR, "WandbMonitor"),
    ("ops.aio", _FILES, "AsyncIOBuilder aio_handle"),
    ("ops.quantizer", _COMPRESSION, "ds_quantizer"),
    ("ops.random_ltd", _DATA, "gather_tokens scatter_tokens slice_attn_mask"),
    (
        "ops.sparse_attention",
        _SPARSE,
        "SparseSelfAttention SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig "
        "BigBirdSparsityConfig BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseAttentionUtils "
        "BertSparseSelfAttention MatMul Softmax",
    ),
    (
        "ops.transformer",
        "no operator is compiled here; the engine's kernels are built in",
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig DeepSpeedTransformerInference DeepSpeedInferenceConfig",
    ),
    ("profiling.config", _PROFILER, "DeepSpeedFlopsProfilerConfig"),
    ("profiling.flops_profiler", _PROFILER, "FlopsProfiler get_model_profile"),
    ("profiling.flops_profiler.profiler", _PROFILER, "FlopsProfiler get_model_profile"),
    ("runtime.bf16_optimizer", _PRECISION, "BF16_Optimizer"),
    ("runtime.data_pipeline.config", _DATA, "get_data_efficiency_config"),
    ("runtime.data_pipeline.curriculum_scheduler", _DATA, "CurriculumScheduler"),
    ("runtime.data_pipeline.data_routing.basic_layer", _DATA, "RandomLayerTokenDrop"),
    (
        "runtime.data_pipeline.data_routing.helper",
        _DATA,
        "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd",
    ),
    ("runtime.data_pipeline.data_sampling.data_analyzer", _DATA, "DataAnalyzer DistributedDataAnalyzer"),
    ("runtime.data_pipeline.data_sampling.data_sampler", _DATA, "DeepSpeedDataSampler"),
    (
        "runtime.data_pipeline.data_sampling.indexed_dataset",
        _DATA,
        "MMapIndexedDataset MMapIndexedDatasetBuilder make_builder make_dataset",
    ),
    ("runtime.domino.transformer", _TENSOR, "DominoTransformer DominoTransformerLayer"),
    ("runtime.eigenvalue", "eigenvalues of layers are not computed here", "Eigenvalue"),
    ("runtime.fp16.fused_optimizer", _PRECISION, "FP16_Optimizer"),
    ("runtime.fp16.loss_scaler", _PRECISION, "CreateLossScaler DynamicLossScaler LossScaler LossScalerBase"),
    ("runtime.fp16.unfused_optimizer", _PRECISION, "FP16_UnfusedOptimizer"),
    ("runtime.pipe.engine", _PIPE, "PipelineEngine PipelineError"),
    (
        "runtime.pipe.schedule",
        _PIPE,
        "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch "
        "OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation "
        "SendGrad TrainSchedule",
    ),
    (
        "runtime.pipe.topology",
        _PIPE,
        "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology",
    ),
    ("runtime.progressive_layer_drop", _DEPTH, "ProgressiveLayerDrop"),
    ("runtime.quantize", _COMPRESSION, "Quantizer"),
    (
        "runtime.sequence_parallel.ulysses_sp",
        _SEQUENCE,
        "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    ),
    ("runtime.sparse_tensor", "gradients of embeddings travel without their zeros by sparse_gradients", "SparseTensor"),
    (
        "runtime.swap_tensor.partitioned_param_swapper",
        _FILES,
        "AsyncPartitionedParameterSwapper PartitionedParamStatus",
    ),
    ("runtime.tensor_parallel", _TENSOR, "TPTrainingConfig TpTrainingManager tp_model_init"),
    ("runtime.tiling", _TILED, "TiledLinear TiledLinearReturnBias"),
    (
        "runtime.zero.linear",
        "torch's linear saves no gathered weight here",
        "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap",
    ),
    (
        "runtime.zero.mics",
        "there is no MiCS yet; use stage 3 or 2",
        "MiCS_AllGatherCoalescedHandle MiCS_Init MiCS_Offload MiCS_Optimizer",
    ),
    ("runtime.zero.tiling", _TILED, "TiledLinear TiledLinearReturnBias split_tensor_along_last_dim"),
    ("sequence.auto_sp", _SEQUENCE, "auto_wrap_model_for_sp"),
    ("sequence.cross_entropy", _SEQUENCE, "vocab_sequence_parallel_cross_entropy"),
    ("sequence.fpdt_layer", _SEQUENCE, "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss"),
    ("sequence.layer", _SEQUENCE, "DistributedAttention single_all_to_all"),
    (
        "utils.comms_logging",
        "there is no log of collectives; `deeptide bench comm` measures them",
        "CommsLogger calc_bw_log get_caller_func",
    ),
    (
        "utils.groups",
        _MOE,
        "_create_expert_and_data_parallel _create_expert_data_and_model_parallel _create_model_parallel "
        "_get_expert_parallel_ranks _get_expert_parallel_group_dict _get_expert_data_parallel_group_dict",
    ),
    ("utils.numa", "`deeptide --bind_cores_to_rank` shares cores out", "get_numa_cores get_numactl_cmd"),
)

FEATURES: dict[str, dict[str, Name]] = {}
for _module, _reason, _words in _ROWS:
    FEATURES.setdefault(f"deepspeed.{_module}", {}).update({name: absent(_reason) for name in _words.split()})

ALIASES_OF_FEATURES = {
    "deepspeed.ops.sparse_attention.sparsity_config": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.sparse_attention.sparse_self_attention": "deepspeed.ops.sparse_attention",
    "deepspeed.ops.transformer.transformer": "deepspeed.ops.transformer",
}
