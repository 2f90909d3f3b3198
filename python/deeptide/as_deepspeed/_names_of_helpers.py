# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the list of names that scripts import for small things: timers, norms, builders, constants."""

from __future__ import annotations

import ast
import os

from deeptide.as_deepspeed._entries import Name, absent, differs, ours, works

_RUNNER = "`deeptide -H hostfile` starts ranks on all hosts; --launcher chooses pdsh, slurm or mpi"
_GLOBAL_NORM = "engine.get_global_grad_norm() has the norm of the last step"


def _assigned(module: str) -> list[str]:
    """The constants that a module of this folder assigns: read, since importing this one loads nothing."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{module}.py")
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]


def _all(module: str, *names: str) -> dict[str, Name]:
    return {name: ours(f"{module}:{name}") for name in names}


_BUILDER_WORDS = (
    "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder CPUOpBuilder CUDAOpBuilder "
    "DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder "
    "FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder OpBuilder "
    "PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder "
    "SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder "
    "UtilsBuilder get_default_compute_capabilities "
)

HELPERS: dict[str, dict[str, Name]] = {
    "deepspeed.ops.op_builder": _all("op_builders", *_BUILDER_WORDS.split()),
    "deepspeed.ops.op_builder.builder": _all(
        "op_builders", "OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", "get_default_compute_capabilities"
    ),
    "deepspeed.ops.op_builder.all_ops": _all("op_builders", "ALL_OPS"),
    "deepspeed.accelerator.cpu_accelerator": {"CPU_Accelerator": works("deeptide.accelerator:CPUAccelerator")},
    "deepspeed.accelerator.cuda_accelerator": {"CUDA_Accelerator": works("deeptide.accelerator:CUDAAccelerator")},
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": works("deeptide.accelerator:Accelerator")},
    "deepspeed.checkpoint.constants": _all("checkpoint_constants", *_assigned("checkpoint_constants")),
    "deepspeed.elasticity": {
        "ensure_immutable_elastic_config": works("deeptide.elasticity:ensure_immutable_elastic_config")
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
    "deepspeed.runtime.constants": _all("runtime_constants", *_assigned("runtime_constants")),
    "deepspeed.runtime.config": _all(
        "configuration",
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
        **_all("norms", "CheckOverflow", "DummyOptim", "get_global_norm", "get_weight_norm", "has_inf_or_nan"),
        **_all("norms", "partition_balanced", "partition_uniform", "prefix_sum_inc"),
        **_all("helpers", "call_to_str", "empty_cache", "ensure_directory_exists", "move_to_device", "noop_decorator"),
        "clip_grad_norm_": differs(
            "norms:clip_grad_norm_",
            'of parameters that have .grad; an engine clips by "gradient_clipping", and keeps .grad with "keep_grad"',
        ),
        "get_grad_norm": differs("norms:get_grad_norm", f"of parameters that have .grad; {_GLOBAL_NORM}"),
    },
    "deepspeed.runtime.zero.utils": _all(
        "zero_utils",
        "ZeRORuntimeException",
        "assert_ints_same_as_other_ranks",
        "assert_lst_len_same_as_other_ranks",
    ),
    "deepspeed.utils": {"safe_update_full_grad_vectorized": works("deeptide.utils:safe_update_full_grad_vectorized")},
    "deepspeed.utils.groups": _all("groups", "_get_broadcast_src_rank", "get_tensor_model_parallel_src_rank"),
    "deepspeed.utils.tensor_fragment": {
        "safe_update_full_grad_vectorized": works("deeptide.utils:safe_update_full_grad_vectorized")
    },
    "deepspeed.utils.timer": _all(
        "timer",
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
    ),
}

ALIASES_OF_HELPERS = {
    "deepspeed.ops.op_builder.async_io": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.cpu_adam": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.fused_adam": "deepspeed.ops.op_builder",
    "deepspeed.ops.op_builder.utils": "deepspeed.ops.op_builder",
    "deepspeed.runtime.fp16.onebit.adam": "deepspeed.runtime.fp16.onebit",
    "deepspeed.runtime.fp16.onebit.lamb": "deepspeed.runtime.fp16.onebit",
    "deepspeed.runtime.fp16.onebit.zoadam": "deepspeed.runtime.fp16.onebit",
}
