# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of test_universal.py: trains some steps, from a checkpoint or from the start, and writes what it has seen.

Arguments: the framework's module, the ZeRO stage, a folder to load from or "", a folder to save to or "", the file for
the results.
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from deepspeed_rank import batches, make_model
from torch import nn

STEPS = 10


def config_of(stage, load):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 16}},
        **({"checkpoint": {"load_universal": True}} if load else {}),
    }


def states_of(framework, model):
    """{name: {role: whole value}} of each parameter."""
    utils = importlib.import_module(f"{framework.__name__}.utils")
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = {"fp32": utils.safe_get_full_fp32_param(parameter)}
        for role in ("exp_avg", "exp_avg_sq"):
            found[name][role] = utils.safe_get_full_optimizer_state(parameter, role)
    return {name: {role: value.detach().clone() for role, value in roles.items()} for name, roles in found.items()}


def main():
    name, stage, load, save, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    framework = importlib.import_module(name)
    model = make_model()
    config = config_of(int(stage), load and name == "deepspeed")
    engine, *_ = framework.initialize(model=model, model_parameters=model.parameters(), config=config)
    seen = {"losses": [], "lr": []}
    if load:
        engine.load_checkpoint(load)
        seen["loaded"] = states_of(framework, model)
        seen["steps"] = engine.global_steps
    data = list(batches(dist.get_rank(), 2 * STEPS))
    for tokens, targets in data[STEPS:] if load else data[:STEPS]:
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss := loss.detach())
        seen["losses"].append(loss.item() / dist.get_world_size())
        seen["lr"].append(engine.get_lr()[0])
    if save:
        engine.save_checkpoint(save)
        seen["saved"] = states_of(framework, model)
    if dist.get_rank() == 0:
        torch.save(seen, out)
    dist.barrier()
    os._exit(0)  # DeepSpeed's destructors wait for groups that are gone


if __name__ == "__main__":
    main()
