# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT and DPO, beside the same scripts under DDP."""

import functools
import os

import libraries
import pytest
import torch
from conftest import run_processes

run_processes = functools.partial(
    run_processes, preload=(*libraries.PRELOAD, "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
)


def tokenizer():
    """Words w3 … w60, as transformers wants them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, libraries.VOCAB)}}
    words["<unk>"] = words.pop(f"w{libraries.VOCAB - 1}")
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(count, seed):
    return [
        " ".join(f"w{min(int(t), libraries.VOCAB - 2)}" for t in row["input_ids"])
        for row in libraries.rows(count, seed)
    ]


def check_sft(folder, name, stage, gas):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    deepspeed = None if stage is None else libraries.ds_config(stage)
    trainer = SFTTrainer(
        model=libraries.make_model(),
        args=libraries.arguments(
            folder, deepspeed, SFTConfig, gradient_accumulation_steps=gas, max_length=16, bf16=False
        ),
        train_dataset=Dataset.from_dict({"text": texts(20, 1)}),
        processing_class=tokenizer(),
    )
    trainer.train()
    libraries.write(folder, name, {"loss": libraries.logged(trainer, "loss")})


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sft(stage, gas, tmp_path, beside_plain):
    beside_plain(check_sft, tmp_path, stage, 10 if gas == 1 else 4, gas, run=run_processes)


def check_dpo(folder, name, stage, gas, precompute):
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    deepspeed = None if stage is None else libraries.ds_config(stage)
    options = {"gradient_accumulation_steps": gas, "max_length": 32, "bf16": False}
    arguments = libraries.arguments(folder, deepspeed, DPOConfig, precompute_ref_log_probs=precompute, **options)
    # From one file: what is computed before lies in a cache beside it, which ranks share.
    keys = ("prompt", "chosen", "rejected")
    pairs = [dict(zip(keys, row)) for row in zip(texts(12, 1), texts(12, 2), texts(12, 3))]
    libraries.write(folder, "pairs", pairs)
    torch.distributed.barrier()
    path = os.path.join(folder, "pairs.json")
    data = load_dataset("json", data_files=path, cache_dir=os.path.join(folder, "cache"), split="train")
    trainer = DPOTrainer(
        model=libraries.make_model(),
        ref_model=None if precompute else libraries.make_model(seed=1),
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    libraries.write(folder, name, {"loss": libraries.logged(trainer, "loss")})


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dpo_with_a_reference_model(stage, gas, tmp_path, beside_plain):
    beside_plain(check_dpo, tmp_path, stage, 6 if gas == 1 else 2, gas, False, run=run_processes)


@pytest.mark.parametrize("stage", [0, 3])
def test_dpo_with_log_probabilities_computed_before(stage, tmp_path, beside_plain):
    beside_plain(check_dpo, tmp_path, stage, 6, 1, True, run=run_processes)
