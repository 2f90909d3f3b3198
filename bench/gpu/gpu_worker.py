# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One contender of `make bench-gpu`, in a process of its own: times its steps and prints what it saw as JSON."""

import argparse
import importlib
import json
import time

import torch

from gpu.gpu_model import SHAPES, Decoder

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


def _by_engine(framework, model, stage):
    module = importlib.import_module(framework)
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=_config(stage))

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    if framework != "deeptide":
        return step, None
    return step, sum(line.predicted_bytes for line in engine.memory())


def _by_torch(model, optimizer):
    def step(x, y):
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, None


def _plain(model):
    """fp32 masters that are cast as they are used, as autocast does it."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    step, forecast = _by_torch(model, optimizer)
    device = next(model.parameters()).device.type

    def under_autocast(x, y):
        with torch.autocast(device, torch.bfloat16):
            return step(x, y)

    return under_autocast, forecast


def _masters(model):
    """bf16 weights and gradients; fp32 masters, which are stepped and then rounded to the weights."""
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    weights = list(model.parameters())
    for master in masters:
        master.grad = torch.zeros_like(master)
    gradients = [master.grad for master in masters]
    optimizer = torch.optim.AdamW(masters, **ADAMW, fused=True)

    def step(x, y):
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(gradients, [weight.grad for weight in weights])
            for weight in weights:
                weight.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
            optimizer.step()
            torch._foreach_copy_(weights, masters)
        return loss

    return step, None


def _fsdp2(model):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device.type
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return _by_torch(model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))


CONTENDERS = {
    "torch": _plain,
    "torch-masters": _masters,
    "fsdp2": _fsdp2,
    **{f"deepspeed-{stage}": (lambda model, s=stage: _by_engine("deepspeed", model, s)) for stage in (0, 3)},
    **{f"deeptide-{stage}": (lambda model, s=stage: _by_engine("deeptide", model, s)) for stage in (0, 2, 3)},
}


def measure(options):
    shape, device = SHAPES[options.model], torch.device(options.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(1)
    with device:
        model = Decoder(shape)
        tokens = torch.randint(shape.vocabulary, (2, shape.batch, shape.context + 1))
    step, forecast = CONTENDERS[options.contender](model)
    del model
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        if on_gpu and number == options.warmup:
            torch.cuda.reset_peak_memory_stats()
        batch = tokens[number % 2]
        begin = time.perf_counter()
        losses.append(float(step(batch[:, :-1], batch[:, 1:]).detach()))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": seconds[options.warmup :],
        "loss": losses[-1],
        "peak": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
        "forecast": forecast,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", required=True, choices=SHAPES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    try:
        result = measure(parser.parse_args())
    except ModuleNotFoundError as error:
        result = {"skipped": str(error)}
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
