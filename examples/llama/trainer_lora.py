# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA with Hugging Face's Trainer and a ds_config.json, as written for DeepSpeed.

deeptide --as-deepspeed --num_ranks 2 examples/llama/trainer_lora.py [--steps 60] [--out runs/llama]
"""

import argparse
from pathlib import Path

from transformers import Trainer, TrainingArguments

from model import make_model, make_rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/llama")
    parser.add_argument("--local_rank", type=int, default=-1, help="the launcher's; not used")
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=given.out,
        deepspeed=str(Path(__file__).with_name("ds_config.json")),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        max_steps=given.steps,
        logging_steps=max(1, given.steps // 6),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_rows(512))
    trainer.train()
    trainer.save_model(given.out)  # the adapters alone
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
