# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Settings that change what DeepSpeed's checkpoints hold, one case each; the model and the data of moved_runs.py.

own: the program's own torch optimizer, as (class, keywords). save: keywords of save_checkpoint. of_model: DeepSpeed's
own functions find other elements (its mapping is of another order than its flat tensors), so that masters are compared
with the weights of the model. Keys of other names change nothing in the files: reduce_scatter, overlap_comm, bucket
sizes, stage3_* limits, zero_hpz_partition_size on one host, gather_16bit_weights_on_model_save.
"""

from moved_runs import case_of

ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def zero_case(stage, precision="fp32", groups=False, own=None, save=None, of_model=False, optimizer=None, **zero):
    """`zero`: further keys of zero_optimization."""
    case = case_of(stage, precision, groups=groups, **({"optimizer": optimizer} if optimizer else {}))
    case["config"]["zero_optimization"].update(zero)
    case |= {"save": save or {}, "of_model": of_model}
    if own:
        case["own"] = own
        case["config"]["zero_allow_untested_optimizer"] = True
        del case["config"]["optimizer"]
    return case


def with_section(case, **sections):
    """The case with further keys of its configuration's sections."""
    for name, keys in sections.items():
        case["config"][name] = {**case["config"].get(name, {}), **keys}
    return case


def own_cases(name, kind, *stages, **keywords):
    return {f"stage{stage}-own-{name}": zero_case(stage, own=(kind, keywords)) for stage in stages}


SETTINGS = {
    # The order of parameters within the flat tensors, and gaps between them.
    "stage1-robin": zero_case(1, of_model=True, round_robin_gradients=True),
    "stage2-robin-groups": zero_case(2, groups=True, of_model=True, round_robin_gradients=True),
    "stage2-robin-bf16": zero_case(2, "bf16", of_model=True, round_robin_gradients=True),
    "stage1-aligned": zero_case(1, parameter_alignment=True),
    "stage2-aligned-robin": zero_case(2, groups=True, parameter_alignment=True, round_robin_gradients=True),
    # Optimizer states by group, without hyper-parameters.
    "stage1-elastic": zero_case(1, elastic_checkpoint=True),
    "stage2-elastic-groups": zero_case(2, groups=True, elastic_checkpoint=True),
    # Frozen parameters that are not saved.
    "stage1-no-frozen": zero_case(1, save={"exclude_frozen_parameters": True}),
    "stage3-no-frozen": zero_case(3, save={"exclude_frozen_parameters": True}),
    # Several flat tensors at stage 3.
    "stage3-sub-groups": zero_case(3, groups=True, sub_group_size=60),
    "stage3-hpz": zero_case(3, zero_hpz_partition_size=2),
    # Offloaded states.
    "stage2-cpu": zero_case(2, optimizer={"type": "AdamW", "params": ADAM}, **CPU),
    "stage3-twin-flow": zero_case(
        3,
        optimizer={"type": "AdamW", "params": ADAM},
        sub_group_size=60,
        offload_optimizer={"device": "cpu", "pin_memory": False, "ratio": 0.4},
    ),
    # Types of masters and sums.
    "stage1-bf16-sums": with_section(zero_case(1, "bf16"), data_types={"grad_accum_dtype": "fp32"}),
    "stage2-fp16-masters": with_section(
        zero_case(2, "fp16", optimizer={"type": "AdamW", "params": ADAM}, **CPU),
        fp16={"fp16_master_weights_and_grads": True},
    ),
    # States of other optimizers, DeepSpeed's by name and the program's own.
    "stage1-adagrad": zero_case(1, optimizer={"type": "Adagrad", "params": {"lr": 1e-2}}),
    **own_cases("sgd", "SGD", 0, 1, 3, lr=1e-2, momentum=0.9),
    **own_cases("plain-sgd", "SGD", 0, 1, 3, lr=1e-2),
    **own_cases("amsgrad", "AdamW", 0, 1, lr=1e-2, amsgrad=True),
    **own_cases("nadam", "NAdam", 0, lr=1e-2),
}
