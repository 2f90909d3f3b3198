# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts of Transformers and Accelerate on a small Llama: the same on Deeptide, as deepspeed, and under DDP.

What this module needs is loaded before the ranks are forked: `PRELOAD`. The interface comes first, since libraries look
for deepspeed when they are imported.
"""

import json
import os

import pytest
import torch

PRELOAD = ("deeptide.as_deepspeed", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
VOCAB, LENGTH, MICRO = 61, 12, 2


def make_model(seed=0, tie=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def rows(count, seed=1, length=LENGTH):
    """`count` rows of tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def ds_config(stage, **extra):
    """A configuration as people write it for Trainer: whatever the arguments say is "auto"."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        **extra,
    }


def write(folder, name, value):
    """Rank 0's result of a check, for the test to compare."""
    if os.environ.get("RANK", "0") == "0":
        with open(os.path.join(folder, f"{name}.json"), "w") as file:
            json.dump(value, file)


def write_everywhere(path, value):
    """The same file from every rank, whole at any moment."""
    own = f"{path}.{os.environ['RANK']}"
    with open(own, "w") as file:
        json.dump(value, file)
    os.replace(own, path)


def read(folder, name):
    with open(os.path.join(folder, f"{name}.json")) as file:
        return json.load(file)


def arguments(folder, deepspeed, kind=None, **options):
    """Trainer's arguments for a CPU; `kind`: a subclass of TrainingArguments."""
    from transformers import TrainingArguments

    options = {
        "per_device_train_batch_size": MICRO,
        "per_device_eval_batch_size": MICRO,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 1.0,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        **options,
    }
    return (kind or TrainingArguments)(output_dir=folder, deepspeed=deepspeed, **options)


def logged(trainer, key):
    return [line[key] for line in trainer.state.log_history if key in line]


def check_equal(here, plain, steps):
    """Compares what a script wrote here and on plain torch, a list of losses among the values.

    Tolerance: both sum the same fp32 gradients in another order, so they differ by a few units of 6e-8 in the first
    step. AdamW divides by sqrt(v) + eps with eps = 1e-5, so an element moves by at most lr / eps = 1e3 times its
    gradient's error, gradients here are near 1e-2, and errors near 1e-9: 1e-6 in a parameter and step. Ten steps and
    the sum over a row of 32 of such parameters make 1e-4 a generous bound; a lost micro-batch or a wrong divisor moves
    a loss by more than 1e-3.
    """
    assert len(plain["loss"]) == steps
    assert plain.keys() == here.keys()
    for key, values in plain.items():
        assert here[key] == pytest.approx(values, abs=1e-4), (key, here[key], values)


# -- the scripts ----------------------------------------------------------------------------------------------------


def make_trainer(folder, deepspeed, model=None, data=None, **options):
    from transformers import Trainer

    return Trainer(
        model=make_model() if model is None else model,
        args=arguments(folder, deepspeed, **options),
        train_dataset=rows(20) if data is None else data,
        eval_dataset=rows(6, seed=2),
    )


def run_trainer(folder, name, stage, gas):
    """`stage` None: plain torch. Windows of 3 micro-batches in epochs of 5: the last one is short."""
    deepspeed = None if stage is None else ds_config(stage)
    trainer = make_trainer(folder, deepspeed, gradient_accumulation_steps=gas)
    trainer.train()
    result = {key: logged(trainer, key) for key in ("loss", "grad_norm")}
    write(folder, name, {**result, "eval": trainer.evaluate()["eval_loss"]})


def make_accelerator(stage, gas, config=None):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    if stage is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=gas)
    if config is None:
        plugin = DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=gas, gradient_clipping=1.0, zero3_save_16bit_model=True
        )
    else:
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


def loader(count=20):
    return torch.utils.data.DataLoader(rows(count), batch_size=MICRO)


def train(accelerator, model, optimizer, scheduler, data, epochs=2):
    """Trains like Accelerate's own examples."""
    losses = []
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def run_accelerate(folder, name, stage, gas):
    accelerator = make_accelerator(stage, gas)
    assert accelerator.num_processes == 2
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)  # Accelerate steps it once per process
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses = train(accelerator, model, optimizer, scheduler, data)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        head = whole["lm_head.weight"].flatten()[:50].tolist()
        write(folder, name, {"loss": losses, "lr": scheduler.get_last_lr(), "head": head})
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped).__name__ == "LlamaForCausalLM" and unwrapped.config.hidden_size == 32
