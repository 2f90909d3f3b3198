# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A network of convolutions that tells shapes apart, in the form of DeepSpeed's CIFAR example.

deeptide --num_ranks 2 examples/cnn/cnn.py [--epochs 5] [--pictures 2048]
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import deeptide
from model import make_model, make_pictures


def accuracy(engine, pictures):
    """The share of pictures that all ranks recognize together; each rank looks at its own."""
    rank, size = engine.world.rank, engine.world.size
    own = torch.utils.data.Subset(pictures, range(rank, len(pictures), size))
    engine.eval()
    with torch.no_grad():
        right = sum((engine(x).argmax(1) == kinds).sum() for x, kinds in DataLoader(own, batch_size=128))
    engine.train()
    total = torch.tensor([float(right)])
    deeptide.comm.all_reduce(total)
    return total.item() / len(pictures)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=2048)
    deeptide.add_config_arguments(parser)
    given = parser.parse_args()
    given.deepspeed_config = given.deepspeed_config or str(Path(__file__).with_name("ds_config.json"))
    model = make_model()
    engine, _, loader, _ = deeptide.initialize(
        args=given, model=model, training_data=make_pictures(given.pictures, seed=1)
    )
    unseen = make_pictures(512, seed=2)
    for epoch in range(given.epochs):
        for pictures, kinds in loader:
            loss = F.cross_entropy(engine(pictures), kinds)
            engine.backward(loss)
            engine.step()
        share = accuracy(engine, unseen)
        if engine.global_rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} accuracy {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
