# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Lightning and Fabric with Deeptide's strategies, beside the same scripts under DDP."""

import functools
import os

import libraries
import pytest
import torch
from conftest import run_processes

run_processes = functools.partial(run_processes, preload=(*libraries.PRELOAD, "lightning"))


def make_module(lr=1e-2):
    from lightning.pytorch import LightningModule

    class Small(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = libraries.make_model()
            self.seen = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.seen.append(loss.item())
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr, eps=1e-5, weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Small()


def make_trainer(folder, stage, gas=1, callbacks=(), checkpoints=False, **options):
    from lightning.pytorch import Trainer

    import deeptide.lightning  # noqa: F401

    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp" if stage is None else f"deeptide_stage_{stage}",
            "max_epochs": 2,
            "accumulate_grad_batches": gas,
            "gradient_clip_val": 1.0,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": checkpoints,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def batches(count=20, seed=1):
    return torch.utils.data.DataLoader(libraries.rows(count, seed), batch_size=libraries.MICRO)


def check_training(folder, name, stage, gas):
    torch.manual_seed(0)
    trainer = make_trainer(folder, stage, gas)
    module = make_module()
    trainer.fit(module, batches(), batches(6, 2))
    evaluated = trainer.validate(module, batches(6, 2), verbose=False)[0]["val_loss"]
    weights = module.model.lm_head.weight.detach().flatten()[:50].tolist()
    libraries.write(folder, name, {"loss": module.seen, "eval": evaluated, "weights": weights})


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trainer_learns_as_under_ddp(stage, gas, tmp_path, beside_plain):
    beside_plain(check_training, tmp_path, stage, 10, gas, run=run_processes)


def check_resume(folder, stage, name, until):
    """Ends the process after `until` steps; with 0, goes on from there to the end."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary

    class Kill(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if trainer.global_step == until:
                torch.distributed.barrier()
                os._exit(0)

    # Lightning resumes at the start of an epoch: within one, it begins the data anew.
    saves = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    broken = os.path.join(folder, "epoch=0.ckpt")
    trainer = make_trainer(folder, stage, 1, [saves, Kill(), ModelSummary(2)], checkpoints=True)
    module = make_module()
    trainer.fit(module, batches(), ckpt_path=broken if os.path.isdir(broken) else None)
    libraries.write(folder, name, {"losses": module.seen[-5:], "lr": trainer.optimizers[0].param_groups[0]["lr"]})
    # The last folder, evaluated by a model that was never fitted.
    last = os.path.join(folder, "epoch=1.ckpt")
    other = make_module()
    make_trainer(folder, stage).validate(other, batches(6, 2), ckpt_path=last, verbose=False)
    assert all(map(torch.equal, other.parameters(), module.parameters()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(stage, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    run_processes(2, check_resume, str(whole), stage, "done", -1)
    run_processes(2, check_resume, str(broken), stage, "done", 7)
    assert not (broken / "done.json").exists()
    run_processes(2, check_resume, str(broken), stage, "done", 0)
    assert libraries.read(broken, "done") == libraries.read(whole, "done")


def check_weights(folder, stage):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(folder, "weights", save_weights_only=True)
    trainer = make_trainer(folder, stage, 1, [saves], checkpoints=True, precision="bf16-true", max_epochs=1)
    module = make_module()
    trainer.fit(module, batches())
    path = os.path.join(folder, "weights.ckpt")
    state = torch.load(path, weights_only=False)["state_dict"]
    assert os.path.isfile(path) and set(state) == set(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(state[name], value.detach()), name
    assert state["model.lm_head.weight"].dtype == torch.bfloat16
    assert module.seen[-1] < module.seen[0] + 1 and trainer.strategy.engine is None


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_alone_are_one_file_in_bf16(stage, tmp_path):
    run_processes(2, check_weights, str(tmp_path), stage)


def check_refusals(folder):
    import deeptide
    from deeptide.lightning import DeeptideStrategy

    for config, text in (
        ({"optimizer": {"type": "AdamW"}}, "configure_optimizers"),
        ({"gradient_accumulation_steps": 4}, "accumulate_grad_batches"),
        ({"zero_optimization": {"stage": 1}}, "stage=3 contradicts"),
    ):
        with pytest.raises(deeptide.ConfigError, match=text):
            DeeptideStrategy(config, stage=3)
    for options, text in (
        ({"gradient_clip_algorithm": "value"}, "clip by norm"),
        ({"precision": "64-true"}, "precision='64-true'"),
    ):
        with pytest.raises(deeptide.ConfigError, match=text):
            make_trainer(folder, 2, devices=1, **options).fit(make_module(), batches())


def test_what_lightning_says_elsewhere_is_refused_by_name(tmp_path):
    run_processes(1, check_refusals, str(tmp_path))


def check_fabric(folder, name, stage, gas):
    from lightning.fabric import Fabric

    from deeptide.lightning import DeeptideFabricStrategy

    strategy = "ddp" if stage is None else DeeptideFabricStrategy(stage=stage)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = libraries.make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))
    data = fabric.setup_dataloaders(batches())
    state = {"model": model, "optimizer": optimizer, "step": 0}

    def train():
        losses = []
        for index, batch in enumerate(data):
            last = (index + 1) % gas == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(**batch).loss
                fabric.backward(loss / gas)
            if last:
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
            losses.append(fabric.all_reduce(loss.detach()).item())
        optimizer.zero_grad()
        return losses

    losses = train()
    path = os.path.join(folder, f"{name}-state")
    fabric.save(path, state)
    losses += train()
    libraries.write(folder, name, {"loss": losses})
    saved = state["step"] // 2
    rest = fabric.load(path, state)
    assert not rest and state["step"] == saved
    assert train() == losses[-5:]


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fabric_learns_as_under_ddp_and_loads_what_it_saved(stage, gas, tmp_path, beside_plain):
    beside_plain(check_fabric, tmp_path, stage, 10, gas, run=run_processes)
