# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One way to train a GPT of 100 M parameters, for five steps, beside plain torch with fp32 masters.

Exits with 1 where losses differ or memory is not as forecast.
"""

import argparse
import sys

import torch

import deeptide
from gpu.gpu_model import SHAPES, Decoder, Shape
from gpu.gpu_worker import CONTENDERS

STEPS, TOLERANCE = 5, 3e-2
HOST = {"device": "cpu"}
# zero_optimization, the section "deeptide", and whether fp16 takes bf16's place.
CASES = {
    "stage-0": ({"stage": 0}, {}, False),
    "stage-3": ({"stage": 3}, {}, False),
    "offload-optimizer": ({"stage": 2, "offload_optimizer": HOST}, {}, False),
    "offload-param": ({"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, {}, False),
    "packed": ({"stage": 2}, {"packed_states": True, "moment_dtype": "bf16"}, False),
    "fp16": ({"stage": 2}, {}, True),
    "compiled": ({"stage": 3}, {}, False),
}
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _shape(device):
    return Shape(12, 768, 12, 3072, 32000, 512, 4, gated=True) if device == "cuda" else SHAPES["tiny"]


def _made(shape, device):
    torch.manual_seed(1)
    with torch.device(device):
        model = Decoder(shape)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def losses_of_torch(shape, device):
    model, x, y = _made(shape, device)
    step, _ = CONTENDERS["torch-masters"](model)
    return [float(step(x, y).detach()) for _ in range(STEPS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    zero, own, fp16 = CASES[options.case]
    shape = _shape(options.device)
    expected = losses_of_torch(shape, options.device)
    model, x, y = _made(shape, options.device)
    if options.case == "compiled":
        model.compile()
    low = {"fp16": {"enabled": True, "initial_scale_power": 8}} if fp16 else {"bf16": {"enabled": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "deeptide": own,
        **low,
    }
    engine, *_ = deeptide.initialize(model=model, config=config)
    losses = []
    for _ in range(STEPS):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    print(engine._core.summary())
    wrong = []
    for line in engine.memory():
        print(f"{line.role}: forecast {line.predicted_bytes}, measured {line.measured_bytes}")
        if abs(line.measured_bytes - line.predicted_bytes) > 0.02 * line.predicted_bytes:
            wrong.append(line.role)
    if options.device == "cuda":
        print(f"allocated {torch.cuda.memory_allocated()}, reserved {torch.cuda.memory_reserved()}")
    farthest = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"torch {expected}\nhere  {losses}")
    path = f"from {losses[0]:.3f} to {losses[-1]:.3f}"
    print(f"losses at most {farthest:.1e} from torch's, {path}; memory off: {', '.join(wrong) or 'none'}")
    sys.exit(farthest > TOLERANCE or bool(wrong))


if __name__ == "__main__":
    main()
