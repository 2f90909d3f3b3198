# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a Trainer script, or of the same model in our own loop: times its steps, writes what it saw as JSON."""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

WAYS = ("ddp", "fsdp2", "deepspeed-2", "deepspeed-3", "deeptide-2", "deeptide-3", "loop-2", "loop-3")
MICRO, LENGTH, VOCABULARY = 2, 128, 8192
LEARNING_RATE = 1e-4


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True, choices=WAYS)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def make_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_rows(count):
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def zero_config(stage, precision, auto):
    def given(value):
        return "auto" if auto else value

    return {
        "train_micro_batch_size_per_gpu": given(MICRO),
        "gradient_accumulation_steps": given(1),
        "gradient_clipping": given(1.0),
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": given(LEARNING_RATE), "betas": given([0.9, 0.999]), "eps": given(1e-8),
                       "weight_decay": given(0.0)},
        },
    }  # fmt: skip


class Clock:
    """Times each step from a common start to its return."""

    def __init__(self, warmup):
        self.warmup, self.seconds, self.losses = warmup, [], []

    def begin(self):
        import torch.distributed

        if len(self.seconds) == self.warmup:
            self.steps_begin = time.monotonic()
        torch.distributed.barrier()
        self.began = time.perf_counter()

    def end(self):
        self.seconds.append(time.perf_counter() - self.began)
        self.ended = time.monotonic()


def train_by_trainer(arguments, clock):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    name, _, stage = arguments.way.partition("-")
    options = {}
    if stage:
        options["deepspeed"] = zero_config(int(stage), arguments.precision, auto=True)
    if name == "fsdp2":
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}

    class Timed(Trainer):
        def training_step(self, *inputs, **others):
            loss = super().training_step(*inputs, **others)
            clock.losses.append(float(loss))
            return loss

    class Times(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.begin()

        def on_step_end(self, *_, **__):
            clock.end()

    steps = arguments.warmup + arguments.steps
    settings = TrainingArguments(
        output_dir=str(arguments.result.parent / "output"), per_device_train_batch_size=MICRO, max_steps=steps,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0, logging_strategy="no",
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=5,
        bf16=arguments.precision == "bf16", **options,
    )  # fmt: skip
    world = int(os.environ["WORLD_SIZE"])
    trainer = Timed(
        model=make_model(), args=settings, train_dataset=make_rows(MICRO * world * steps), callbacks=[Times()]
    )
    trainer.train()
    if name == "fsdp2":
        from torch.distributed.fsdp import FSDPModule

        if not isinstance(trainer.model_wrapped, FSDPModule):
            kind = type(trainer.model_wrapped).__name__
            raise NotImplementedError(f"Accelerate made a {kind} of the model, not FSDP2")


def train_by_loop(arguments, clock):
    import deeptide
    import torch

    stage = int(arguments.way.partition("-")[2])
    engine, *_ = deeptide.initialize(model=make_model(), config=zero_config(stage, arguments.precision, auto=False))
    world, steps = int(os.environ["WORLD_SIZE"]), arguments.warmup + arguments.steps
    rows = make_rows(MICRO * world * steps)[int(os.environ["RANK"]) :: world]
    for step in range(steps):
        own = rows[step * MICRO : (step + 1) * MICRO]
        batch = {key: torch.stack([row[key] for row in own]) for key in own[0]}
        clock.begin()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        clock.losses.append(loss.item())
        clock.end()


def main():
    arguments = parse_arguments()
    name = arguments.way.partition("-")[0]
    try:
        if name == "deeptide":
            import deeptide.as_deepspeed  # noqa: F401 - before the libraries look for deepspeed
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        arguments.result.write_text(json.dumps({"skipped": f"cannot be imported: {error}"}))
        sys.exit(1)
    torch.set_num_threads(1)
    clock = Clock(arguments.warmup)
    begin = time.perf_counter()
    try:
        (train_by_loop if name == "loop" else train_by_trainer)(arguments, clock)
    except NotImplementedError as error:
        arguments.result.write_text(json.dumps({"skipped": str(error)}))
        sys.exit(1)
    except Exception as error:
        traceback.print_exc()
        arguments.result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    result = {
        "steps_between": (clock.steps_begin, clock.ended),
        "step_seconds": clock.seconds[arguments.warmup :],
        "losses": clock.losses,
        "whole_seconds": time.perf_counter() - begin,
    }
    arguments.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
