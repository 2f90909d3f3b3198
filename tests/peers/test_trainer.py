# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with a ds_config.json, beside the same script under DDP."""

import functools
import os
from importlib.metadata import version

import libraries
import pytest
import torch
from conftest import run_processes
from libraries import make_trainer


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trainer_learns_as_under_ddp(stage, gas, tmp_path, beside_plain):
    beside_plain(libraries.run_trainer, tmp_path, stage, 10 if gas == 1 else 4, gas)


def run_sharing(folder, name, stage, gas):
    """Trains like run_trainer, with pairs of ranks that share layers. Saves the whole model."""
    from safetensors.torch import load_file

    config = libraries.ds_config(stage, tensor_parallel={"autotp_size": 2})
    trainer = make_trainer(folder, config, gradient_accumulation_steps=gas)
    trainer.train()
    assert trainer.model_wrapped.mesh == {"pipe": 1, "data": 2, "tensor": 2}
    result = {key: libraries.logged(trainer, key) for key in ("loss", "grad_norm")}
    engine = trainer.model_wrapped.eval()
    with torch.no_grad():  # evaluate() takes the ranks of a pair for two that have seen other rows
        loss = engine(**trainer.data_collator(list(trainer.eval_dataset))).loss
    libraries.write(folder, name, {**result, "eval": loss.item()})
    trainer.save_model(os.path.join(folder, "model"))
    torch.distributed.barrier()
    saved = load_file(os.path.join(folder, "model", "model.safetensors"))
    whole = engine.module_state_dict()
    assert all(torch.equal(whole[key], value) for key, value in saved.items()) and len(saved) > 3


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_share_layers_by_autotp(stage, gas, tmp_path, beside_plain):
    """DeepSpeed's own example of it. Trainer and Accelerate count each sample once for each of the ranks that share."""
    here = functools.partial(run_processes, 4)
    beside_plain(libraries.run_trainer, tmp_path, stage, 10 if gas == 1 else 4, gas, here=(here, run_sharing))


# -- saving ---------------------------------------------------------------------------------------------------------


def check_until(folder, stage, name, steps, resume):
    """Trains to the end, or ends the process after `steps`, as a kill does."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_save(self, args, state, control, **others):
            torch.distributed.barrier()
            if state.global_step == steps:
                os._exit(0)

    trainer = make_trainer(folder, libraries.ds_config(stage), save_strategy="steps", save_steps=3)
    trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=resume)
    libraries.write(folder, name, {"loss": libraries.logged(trainer, "loss"), "eval": trainer.evaluate()["eval_loss"]})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(stage, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    run_processes(2, check_until, str(whole), stage, "done", 0, False)
    # An epoch has 5 steps. Trainer of Transformers 4 resumes any epoch with the rows of the first in their order.
    killed_after = 6 if int(version("transformers").split(".")[0]) >= 5 else 3
    run_processes(2, check_until, str(broken), stage, "done", killed_after, False)
    assert not (broken / "done.json").exists()
    run_processes(2, check_until, str(broken), stage, "done", 0, True)
    assert libraries.read(broken, "done") == libraries.read(whole, "done")


def check_best(folder, stage):
    """The best of two evaluations is loaded at the end, saved, and read by from_pretrained: under stage 3 as well."""
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(
        folder,
        libraries.ds_config(stage),
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=0.3,
    )
    trainer.train()
    losses = libraries.logged(trainer, "eval_loss")
    best = trainer.evaluate()["eval_loss"]
    assert best == pytest.approx(min(losses), rel=1e-6) and losses[0] != losses[1]
    trainer.save_model(os.path.join(folder, "model"))
    torch.distributed.barrier()
    again = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model"))
    for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        assert torch.equal(value.detach(), again.get_parameter(name).detach()), name
    if stage != 3:  # Transformers evaluates with an engine at stage 3 only
        return
    trainer = make_trainer(folder, libraries.ds_config(stage), model=again)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_best_model_is_loaded_saved_and_read_again(stage, tmp_path):
    run_processes(2, check_best, str(tmp_path), stage)


# -- what else trainers do ------------------------------------------------------------------------------------------


def check_generation(folder):
    """Ranks end at different lengths; then one evaluates alone."""
    trainer = make_trainer(folder, libraries.ds_config(3), max_steps=2)
    trainer.train()
    model = trainer.model
    model.eval()
    rank = torch.distributed.get_rank()
    prompt = torch.tensor([[5 + rank, 7]])
    tokens = model.generate(prompt, max_new_tokens=3 + 4 * rank, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert tokens.shape[1] == 5 + 4 * rank
    tokens = model.generate(prompt, max_new_tokens=3 + 4 * rank, do_sample=False, eos_token_id=None, synced_gpus=True)
    if rank == 0:
        with torch.no_grad():
            assert model(input_ids=prompt, labels=prompt).loss.isfinite()
    torch.distributed.barrier()


def test_generation_ends_early_on_some_ranks(tmp_path):
    run_processes(2, check_generation, str(tmp_path))


def check_resize(folder, stage):
    deepspeed = libraries.ds_config(stage)
    arguments = libraries.arguments(folder, deepspeed)  # alive: stage 3's paths of Transformers are on
    model = libraries.make_model(tie=True)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(libraries.VOCAB + 5)
    assert model.get_input_embeddings().weight.shape[0] == libraries.VOCAB + 5 == model.config.vocab_size
    assert torch.equal(model.get_input_embeddings().weight[: libraries.VOCAB].detach(), old)
    trainer = make_trainer(folder, deepspeed, model=model, max_steps=3)
    trainer.train()
    libraries.write(folder, f"stage{stage}", libraries.logged(trainer, "loss"))
    del arguments


def test_embeddings_are_resized(tmp_path):
    for stage in (0, 3):
        run_processes(2, check_resize, str(tmp_path), stage)
    assert libraries.read(tmp_path, "stage0") == libraries.read(tmp_path, "stage3")


def check_sweep(folder, stage):
    """model_init: each train() builds a new model, and the engine before goes."""
    from transformers import Trainer

    trainer = Trainer(
        model_init=lambda: libraries.make_model(),
        args=libraries.arguments(folder, libraries.ds_config(stage), max_steps=3),
        train_dataset=libraries.rows(20),
    )
    trainer.train()
    first = libraries.logged(trainer, "loss")
    trainer.train()
    assert libraries.logged(trainer, "loss") == first


@pytest.mark.parametrize("stage", [0, 3])
def test_each_train_of_a_sweep_begins_anew(stage, tmp_path):
    run_processes(2, check_sweep, str(tmp_path), stage)


def check_mismatch(folder):
    deepspeed = libraries.ds_config(2, train_micro_batch_size_per_gpu=7)
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu=7"):
        make_trainer(folder, deepspeed).train()


def test_a_configuration_against_the_arguments_is_transformers_error(tmp_path):
    run_processes(1, check_mismatch, str(tmp_path))


def check_own_optimizer(folder, name, stage):
    """No "optimizer" in the configuration: Trainer's AdamW, whose groups decay some parameters only."""
    config = None
    if stage is not None:
        config = libraries.ds_config(stage)
        del config["optimizer"]
    trainer = make_trainer(folder, config, weight_decay=0.3, lr_scheduler_type="cosine")
    trainer.train()
    libraries.write(folder, name, {"loss": libraries.logged(trainer, "loss"), "eval": trainer.evaluate()["eval_loss"]})


@pytest.mark.parametrize("stage", [0, 3])
def test_trainers_own_optimizer(stage, tmp_path, beside_plain):
    beside_plain(check_own_optimizer, tmp_path, stage, 10)


def check_raising(folder, stage):
    from transformers import TrainerCallback

    class Raise(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 2 and torch.distributed.get_rank() == 1:
                raise KeyError("a callback's own")

    config = libraries.ds_config(stage, deeptide={"comm_timeout": 60})
    trainer = make_trainer(folder, config)
    trainer.add_callback(Raise())
    trainer.train()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_callback_that_raises_on_one_rank_ends_all(stage, tmp_path):
    done = run_processes(2, check_raising, str(tmp_path), stage, check=False)
    assert [rank.returncode for rank in done] == [1, 1]
    assert "a callback's own" in done[1].stderr
