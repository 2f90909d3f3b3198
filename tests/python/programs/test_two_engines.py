# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Two engines train whose losses run through both models."""

import datetime
import os
import time

import models
import pytest
import torch.distributed as dist
from conftest import run_processes, run_ranks
from test_divergence import STEPS, WIDTH, WORLDS, Plain, assert_close, inputs, trained
from torch import nn

import deeptide

pytestmark = pytest.mark.both_ways


class Mlp(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        hidden = [nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(16, outputs))

    def forward(self, x):
        return self.layers(x)


def adversaries():
    return models.make_model(1, Mlp, outputs=WIDTH), models.make_model(2, Mlp, outputs=1)


def discriminator_loss(generator, discriminator, rank, step):
    fake = generator(inputs(rank, step)).detach()
    return (discriminator(inputs(rank, step, "real")) - 1).square().mean() + discriminator(fake).square().mean()


def generator_loss(generator, discriminator, rank, step):
    return (discriminator(generator(inputs(rank, step))) - 1).square().mean()


def train_adversaries(world, stages):
    pair = adversaries()
    engines = [
        deeptide.initialize(model=model, config=models.config(stage), world=world)[0]
        for model, stage in zip(pair, stages, strict=True)
    ]
    generator, discriminator = engines
    for step in range(STEPS):
        discriminator.backward(discriminator_loss(generator, discriminator, world.rank, step))
        assert discriminator.step()
        # The gradients that this leaves in the discriminator are not its own.
        generator.backward(generator_loss(generator, discriminator, world.rank, step))
        assert generator.step()
        discriminator.zero_grad()
    return {f"{i}.{name}": w for i in (0, 1) for name, w in trained(pair[i], engines[i]).items()}


def reference_adversaries(world):
    pair = adversaries()
    plain = [Plain(model.parameters()) for model in pair]
    for step in range(STEPS):
        for model, loss_of in ((1, discriminator_loss), (0, generator_loss)):
            for rank in range(world):
                loss_of(*pair, rank, step).backward()
            plain[model].step(world)
        plain[1].optimizer.zero_grad(set_to_none=False)
    return {f"{i}.{name}": p.detach() for i in (0, 1) for name, p in pair[i].named_parameters()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stages", [(0, 0), (2, 2), (3, 3), (3, 1)], ids=str)
def test_two_engines_train_against_each_other(stages, world):
    assert_close(run_ranks(world, train_adversaries, stages), reference_adversaries(world))


def train_alone_then_together():
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    store.set_timeout(datetime.timedelta(seconds=30))
    for size in (1, 2):
        if rank >= size:
            continue
        dist.init_process_group("gloo", store=dist.PrefixStore(str(size), store), rank=rank, world_size=size)
        for _ in range(2):
            engine = deeptide.initialize(model=models.make_model(), config=models.config(2))[0]
            engine.backward(engine(*models.batches(1, 2)[0]))
            assert engine.step() and engine.world_size == size
            engine.destroy()
        dist.destroy_process_group()


def test_ranks_meet_although_one_of_them_has_made_engines_in_another_group():
    run_processes(2, train_alone_then_together)


def wait_in_two_engines(elsewhere):
    """Rank 0 steps the second engine alone. Rank 1 waits in the first one, or sleeps."""
    deeptide.init_distributed()
    settings = models.config(1, deeptide={"comm_timeout": 3})
    first, second = (deeptide.initialize(model=model, config=settings)[0] for model in adversaries())
    rank = first.world.rank
    if rank == 0 or elsewhere:
        engine = (second, first)[rank]
        engine.backward(engine(inputs(rank, 0, "real" if rank == 0 else "")).square().mean())
        with pytest.raises(deeptide.CommError) as error:
            engine.step()
        print(error.value)
    else:
        time.sleep(6)
        print("slept")


def test_errors_name_the_engine_and_where_the_others_are():
    one, other = (each.stdout for each in run_processes(2, wait_in_two_engines, True, check=False))
    assert "rank 0 timed out after 3 s at engine 2 (Mlp), step 0, " in one, one
    assert "rank 1 is in another engine and waits: engine 1 (Mlp), step 0" in one, one
    assert "engine 1 (Mlp), step 0, step, " in other, other


def test_a_rank_that_is_alive_and_waits_for_nobody_is_told_as_such():
    one, _ = (each.stdout for each in run_processes(2, wait_in_two_engines, False, check=False))
    assert "at engine 2 (Mlp), step 0" in one and "no report from rank 1 (alive as process " in one, one
