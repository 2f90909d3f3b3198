# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a run that DeepSpeed begins, and either side ends: writes checkpoints, and what ten further steps give.

Arguments: a file of cases by name, the folder of all that is written. tests/python/checkpoint/golden_deepspeed.tar.xz
holds what this wrote, so the model and the data here and in moved_runs.py, among the imports there, are one.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "checkpoint" / "imports"))
from moved_runs import CLIENT_STATE, FURTHER, STEPS, batch_of, loss_of, make_model, parameters_of


def allow_fp16():
    """DeepSpeed refuses fp16 on a CPU, where torch 2.13 has it; all else is DeepSpeed's own."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    CPU_Accelerator.supported_dtypes = lambda self: [torch.float, torch.bfloat16, torch.half]


def step(engine, number, same):
    tokens, targets = batch_of(number, 0 if same else dist.get_rank())
    loss = loss_of(engine, tokens, targets)
    engine.backward(loss)
    engine.step()
    loss = loss.detach().float()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def base_of(optimizer):
    """The optimizer that steps, within those that DeepSpeed puts around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def roles_of(optimizer):
    """The names of the states that have a tensor's elements."""
    states = [state for state in base_of(optimizer).state.values() if state]
    return [key for key, value in (states[0] if states else {}).items() if torch.is_tensor(value) and value.dim()]


def states_of(engine, model, of_model):
    """Masters and states by parameter and role, on every rank. `of_model`: the weights of the model instead."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer, states = engine.optimizer, {}
    masters = {parameter: parameter for parameter in model.parameters()}  # as keys too: a detached one is another
    if engine.zero_optimization_stage() == 0 and hasattr(optimizer, "fp32_groups"):
        for group, fp32_group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update(zip(group, fp32_group, strict=True))
    several = len(base_of(optimizer).param_groups) > 1  # DeepSpeed finds no states of several
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if of_model:
            found = {"master": parameter}
        elif hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
            roles = () if several else roles_of(optimizer)
            found = {role: safe_get_full_optimizer_state(parameter, role) for role in roles}
            found["master"] = safe_get_full_fp32_param(parameter)
        elif hasattr(optimizer, "fp32_groups_flat"):
            found = {}  # of FP16_Optimizer, in one flat tensor
        else:
            master = masters[parameter]
            state = base_of(optimizer).state[master]
            found = {"master": master, **{role: state[role] for role in roles_of(optimizer)}}
        states |= {f"{name}/{role}": value.detach().clone() for role, value in found.items()}
    return states


def to_universal(folder, tag):
    from deepspeed.checkpoint.ds_to_universal import main

    class Arguments:
        input_folder = str(folder / tag)
        output_folder = str(folder / f"{tag}_universal")
        num_extract_workers = num_merge_workers = 1
        keep_temp_folder = False
        strict = True
        inject_missing_state = True

    main(Arguments)


def run(name, case, out):
    import deepspeed

    torch.manual_seed(0)
    folder = out / name
    model = make_model()
    parameters, own = parameters_of(model, case["groups"]), {}
    if "own" in case:
        kind, keywords = case["own"]
        own = {"optimizer": getattr(torch.optim, kind)(parameters, **keywords)}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=case["config"], **own)
    losses = [step(engine, number, case["same"]) for number in range(STEPS)]
    engine.save_checkpoint(str(folder), tag="middle", client_state=dict(CLIENT_STATE), **case.get("save", {}))
    of_model = case.get("of_model", False)
    middle = states_of(engine, model, of_model)
    losses += [step(engine, number, case["same"]) for number in range(STEPS, STEPS + FURTHER)]
    end = states_of(engine, model, of_model)
    if dist.get_rank() == 0:
        if case.get("universal"):
            to_universal(folder, "middle")
        torch.save({"middle": middle, "end": end, "losses": losses}, folder / "expected.pt")
    dist.barrier()
    engine.destroy()


def main():
    cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    allow_fp16()
    dist.init_process_group("gloo")
    for name, case in json.loads(Path(cases).read_text()).items():
        run(name, case, Path(out))
    dist.barrier()
    os._exit(0)  # DeepSpeed's destructors wait for groups that are gone


if __name__ == "__main__":
    main()
