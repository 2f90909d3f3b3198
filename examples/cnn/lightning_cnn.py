# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The same with Lightning's Trainer, which starts the ranks itself.

python examples/cnn/lightning_cnn.py [--epochs 5] [--pictures 2048] [--out runs/cnn]
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

import deeptide.lightning  # noqa: F401  registers the strategies
from model import make_model, make_pictures


class Shapes(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, _):
        pictures, kinds = batch
        return F.cross_entropy(self.model(pictures), kinds)

    def validation_step(self, batch, _):
        pictures, kinds = batch
        right = (self.model(pictures).argmax(1) == kinds).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--out", default="runs/cnn")
    given = parser.parse_args()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="deeptide_stage_1",
        max_epochs=given.epochs,
        default_root_dir=given.out,
        callbacks=[ModelCheckpoint(given.out, filename="best", monitor="accuracy", mode="max")],
        logger=False,
    )
    training = DataLoader(make_pictures(given.pictures, seed=1), batch_size=32, shuffle=True)
    trainer.fit(Shapes(), training, DataLoader(make_pictures(512, seed=2), batch_size=128))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.1%}")


if __name__ == "__main__":
    main()
