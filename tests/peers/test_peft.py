# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT, with Trainer and with Accelerate by hand, beside the same scripts under DDP."""

import os

import libraries
import pytest
import torch
from conftest import run_processes
from libraries import loader, make_accelerator, make_trainer, train
from safetensors.torch import load_file


def make_lora():
    from peft import LoraConfig, get_peft_model

    model = libraries.make_model()
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def check_trainer(folder, name, stage, gas, steps=0, resume=False):
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_save(self, args, state, control, **others):
            torch.distributed.barrier()
            if state.global_step == steps:
                os._exit(0)

    deepspeed = None if stage is None else libraries.ds_config(stage)
    trainer = make_trainer(
        folder, deepspeed, make_lora(), gradient_accumulation_steps=gas, save_strategy="steps", save_steps=2
    )
    trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=resume)
    libraries.write(folder, name, {"loss": libraries.logged(trainer, "loss"), "eval": trainer.evaluate()["eval_loss"]})
    adapter = os.path.join(folder, "adapter")
    trainer.save_model(adapter)
    torch.distributed.barrier()
    from peft import PeftModel

    again = PeftModel.from_pretrained(libraries.make_model(), adapter)
    trained = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    for key, value in again.named_parameters():
        assert torch.equal(value.detach(), trained[key].detach()), key


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lora_with_trainer(stage, gas, tmp_path, beside_plain):
    beside_plain(check_trainer, tmp_path, stage, 10 if gas == 1 else 4, gas)
    if gas == 3:
        return
    broken = tmp_path / "broken"
    broken.mkdir()
    run_processes(2, check_trainer, str(broken), "here", stage, gas, 4)
    assert not (broken / "here.json").exists()
    run_processes(2, check_trainer, str(broken), "here", stage, gas, 0, True)
    assert libraries.read(broken, "here") == libraries.read(tmp_path, "here")


def check_accelerate(folder, name, stage, gas):
    accelerator = make_accelerator(stage, gas)
    model = make_lora()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses = train(accelerator, model, optimizer, scheduler, data)
    libraries.write(folder, name, {"loss": losses})
    folder = os.path.join(folder, name)
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lora_by_hand(stage, gas, tmp_path, beside_plain):
    plain = beside_plain(check_accelerate, tmp_path, stage, 10, gas)
    expected = load_file(plain / "adapter_model.safetensors")
    here = load_file(tmp_path / "here" / "adapter_model.safetensors")
    assert here.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(here[key], value, rtol=0, atol=1e-4)


def check_late_adapters(folder, name, stage):
    """Two steps of the whole model; then PEFT puts adapters into it and freezes the rest."""
    from peft import LoraConfig, get_peft_model

    model = libraries.make_model()
    engine, settings = None, {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.0}
    if stage is None:
        torch.distributed.init_process_group("gloo")
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    else:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": libraries.MICRO,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": settings},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "deeptide": {"shared_memory": False},
        }
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
    losses = []
    for step, first in enumerate(range(0, 24, 4)):
        if step == 2:
            torch.manual_seed(3)
            get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
            optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
        own = libraries.rows(24)[first + torch.distributed.get_rank() : first + 4 : 2]
        batch = {key: torch.stack([row[key] for row in own]) for key in own[0]}
        loss = (engine or model)(**batch).loss
        if engine is None:
            loss.backward()
            for p in model.parameters():
                if p.grad is not None:
                    torch.distributed.all_reduce(p.grad.div_(2))
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    adapters = sum(p.detach().double().abs().sum().item() for p in model.parameters() if p.requires_grad)
    libraries.write(folder, name, {"loss": losses, "adapters": adapters / 100})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_that_come_after_initialize(stage, tmp_path, beside_plain):
    beside_plain(check_late_adapters, tmp_path, stage, 6)
