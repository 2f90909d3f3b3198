# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The same as trainer_lora.py with Accelerate and a loop by hand.

deeptide --as-deepspeed --num_ranks 2 examples/llama/accelerate_lora.py [--steps 60] [--out runs/llama]
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs

from model import make_model, make_rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/llama")
    given = parser.parse_args()
    plugin = DeepSpeedPlugin(hf_ds_config=str(Path(__file__).with_name("ds_config.json")), gradient_clipping=1.0)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loader = torch.utils.data.DataLoader(make_rows(512), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, steps = [], 0
    while steps < given.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            steps += accelerator.sync_gradients
            if steps == given.steps:
                break
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        given.out, state_dict=state, is_main_process=accelerator.is_main_process
    )
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
