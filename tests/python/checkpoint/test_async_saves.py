# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Saves beside training, over real processes: what they hold, what ends a process meanwhile, what a kill leaves."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from conftest import _environment, run_processes
from ports import free_ports
from torch import nn

import deeptide

ROLES = ("master", "exp_avg", "exp_avg_sq")


class WithBuffers(models.TinyModel):
    """A frozen parameter and a buffer, which every forward changes."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(20), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens, targets):
        self.seen += 1
        return super().forward(tokens, targets) + 0 * self.bias.sum()


def start(stage, world=None, **extra):
    model = models.make_model(kind=WithBuffers)
    return deeptide.initialize(model=model, config=models.config(stage, **extra), world=world)[0]


def world_of_one():
    return deeptide.make_world(dist.HashStore(), 0, 1)


def batch_of(step):
    tokens = torch.randint(37, (4, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(engine, first, count):
    """Returns losses and outcomes."""
    seen = []
    for step in range(first, first + count):
        loss = engine(*batch_of(step))
        engine.backward(loss)
        seen.append((loss.item(), engine.step()))
    return seen


def weights_of(engine):
    names = [name for name, _ in engine.module.named_parameters()]
    state = {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in ROLES}
    state.update(engine.module_state_dict())
    return {name: value for name, value in state.items() if value is not None}


def next_loss(engine):
    """The loss of the batch after two steps; every rank has the same one."""
    with torch.no_grad():
        return engine(*batch_of(2)).item()


def settings_of(precision, placement, folder):
    fp16 = {"enabled": True, "initial_scale_power": 8}  # by the default scale the first steps overflow
    extra = {"bf16": True} if precision == "bf16" else {"fp16": fp16} if precision == "fp16" else {}
    extra["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 7}}
    if placement != "none":
        extra["zero"] = {"offload_optimizer": {"device": placement, "nvme_path": f"{folder}/nvme"}}
    return extra


def save(how, stage, extra, folder):
    """Programs write parameters and buffers as they like after a save."""
    engine = start(stage, checkpoint={"async": True}, **extra)
    assert all(outcome.applied for _, outcome in train(engine, 0, 2))
    loss, lr = next_loss(engine), engine.get_lr()
    expected = weights_of(engine)
    engine.save_checkpoint(f"{folder}/saves", tag="t", client_state={"epoch": 3}, blocking=how == "blocking")
    with torch.no_grad():
        engine.module.seen.fill_(-1)
        if stage < 3:
            engine.module.bias.fill_(9)
            for parameter in engine.module.parameters():
                parameter.data.mul_(1.25)
    if how == "beside":
        outcomes = train(engine, 2, 2)
        while not any(outcome.saved for _, outcome in outcomes):
            outcomes = train(engine, 4, 1)
        assert [outcome.saved for _, outcome in outcomes if outcome.saved] == [f"{folder}/saves/t"]
    assert engine.wait_for_save() is None
    torch.save((expected, loss, lr), f"{folder}/expected.{engine.global_rank}")


def load(stage, extra, folder):
    engine = start(stage, **extra)
    assert engine.load_checkpoint(f"{folder}/saves") == (f"{folder}/saves/t", {"epoch": 3})
    expected, loss, lr = torch.load(f"{folder}/expected.0")
    found = weights_of(engine)
    assert engine.get_lr() == lr
    assert engine.global_steps == 2
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert next_loss(engine) == loss


@pytest.mark.costly
@pytest.mark.parametrize("placement", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("load_world", [1, 2, 3, 4])
@pytest.mark.parametrize("load_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["blocking", "beside"])
def test_what_is_loaded_is_what_was_saved(how, stage, world, load_stage, load_world, precision, placement, tmp_path):
    extra = settings_of(precision, placement if stage else "none", str(tmp_path))
    run_processes(world, save, how, stage, extra, str(tmp_path))
    extra = settings_of(precision, placement if load_stage else "none", str(tmp_path))
    run_processes(load_world, load, load_stage, extra, str(tmp_path))


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_in_another_type(stage, precision, extra, folder):
    """Masters, moments and buffers are what they were; weights are the masters, rounded to what this engine takes."""
    engine = start(stage, **extra)
    assert engine.load_checkpoint(f"{folder}/saves") == (f"{folder}/saves/t", {"epoch": 3})
    expected, expected_loss, lr = torch.load(f"{folder}/expected.0")
    found = weights_of(engine)
    assert (engine.get_lr(), engine.global_steps) == (lr, 2)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        was = expected.get(f"{name}/master", expected[name])
        floating = "/" not in name and was.is_floating_point()
        assert torch.equal(value, was.to(TYPES[precision]) if floating else was), name
    [(loss, outcome)] = train(engine, 2, 1)
    assert outcome.applied
    assert loss == pytest.approx(expected_loss, rel=2e-2)  # bf16 has three digits


@pytest.mark.costly
@pytest.mark.parametrize("load_placement", ["cpu", "nvme", "none"])
@pytest.mark.parametrize("placement", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("load_precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stages", [(1, 3), (3, 2), (2, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("how", ["blocking", "beside"])
def test_another_type_and_placement_load_the_same_values(
    how, worlds, stages, precision, load_precision, placement, load_placement, tmp_path
):
    run_processes(worlds[0], save, how, stages[0], settings_of(precision, placement, str(tmp_path)), str(tmp_path))
    extra = settings_of(load_precision, load_placement, str(tmp_path))
    run_processes(worlds[1], load_in_another_type, stages[1], load_precision, extra, str(tmp_path))


def save_rounded(folder):
    engine = start(1, checkpoint={"bf16_moments": True})
    train(engine, 0, 2)
    torch.save(weights_of(engine), f"{folder}/expected")
    engine.save_checkpoint(folder, tag="blocking")
    engine.save_checkpoint(folder, tag="beside", blocking=False)


def test_moments_are_saved_in_bf16_by_choice(tmp_path):
    run_processes(1, save_rounded, str(tmp_path))
    expected = torch.load(tmp_path / "expected")
    for tag in ("blocking", "beside"):
        engine = start(0, world=world_of_one())
        engine.load_checkpoint(tmp_path, tag=tag)
        for name, value in weights_of(engine).items():
            exact = expected[name]
            rounds = name.endswith(("/exp_avg", "/exp_avg_sq"))
            assert torch.equal(value, exact.bfloat16().float() if rounds else exact), name
        engine.destroy()


def test_a_first_loss_that_differs_is_refused_once(tmp_path):
    engine = start(0, world=world_of_one(), checkpoint={"loss_tolerance": 0.5})
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    train(engine, 2, 1)  # the same batch again: about the same loss
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(*batch_of(3)) * 9)
    with pytest.raises(
        deeptide.CheckpointError, match=r"the first loss after load_checkpoint is .*, the last one before"
    ):
        engine.step()
    assert engine.step().applied
    engine.destroy()


# -- ends -------------------------------------------------------------------------------------------------------------


def end_while_saving(how, folder):
    engine = start(2, checkpoint={"async": True})
    train(engine, 0, 1)
    engine.save_checkpoint(folder, tag="last")
    if how == "destroy":
        engine.destroy()
        dist.barrier()
        assert Path(folder, "last", "manifest.json").exists()
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        train(engine, 1, 10_000)
        raise AssertionError("SIGTERM was lost")


@pytest.mark.costly
@pytest.mark.parametrize("how", ["return", "destroy", "SIGTERM"])
def test_a_save_beside_training_is_finished_by_the_end(how, tmp_path):
    ranks = run_processes(2, end_while_saving, how, str(tmp_path), check=False)
    wanted = -signal.SIGTERM if how == "SIGTERM" else 0
    assert [rank.returncode for rank in ranks] == [wanted] * 2, ranks[0].stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest"]
    run_processes(1, load_last, str(tmp_path))


def load_last(folder):
    engine = start(0)
    assert engine.load_checkpoint(folder)[0] == f"{folder}/last"


# -- kill -9 ----------------------------------------------------------------------------------------------------------

KILLED = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from test_async_saves import save_for_ever
save_for_ever(sys.argv[2])
"""


def save_for_ever(folder):
    deeptide.init_distributed()
    engine = start(1, checkpoint={"async": True, "keep_last": 2}, bf16=True)
    if engine.load_checkpoint(folder)[0] is None:
        train(engine, 0, 1)
        engine.save_checkpoint(folder, blocking=True)  # on a busy machine a kill comes before the first other one
    if engine.global_rank == 0:
        print("begun", flush=True)
    for step in range(10_000):
        train(engine, engine.global_steps, 1)
        if step % 2 == 0:
            engine.save_checkpoint(folder)


class Expected:
    """A run that nobody interrupts, as far as it is needed. Its ranks would see one batch: any number is as good."""

    def __init__(self):
        self.engine = start(0, world=world_of_one(), bf16=True)

    def check(self, engine):
        train(self.engine, self.engine.global_steps, engine.global_steps - self.engine.global_steps)
        expected, found = weights_of(self.engine), weights_of(engine)
        assert expected.keys() == found.keys()
        for name in expected.keys() - {"seen"}:
            assert torch.equal(expected[name], found[name]), name


def check_folder(folder):
    """Whatever is a checkpoint by its name can be loaded. Returns an engine that has the latest one's state."""
    engine = start(0, world=world_of_one(), bf16=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.name.endswith(".tmp"):
            engine.load_checkpoint(folder, tag=path.name)
            assert path.name == f"global_step{engine.global_steps}"
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    return engine


def kill_one_then_all(folder, dice):
    """Two ranks save beside training; at some moment one is killed, and soon after it the other."""
    port = free_ports(1)[0]
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder)]
    ranks = [
        subprocess.Popen(command, env=_environment(rank, 2, port, None), stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert ranks[0].stdout.readline() == "begun\n"
    time.sleep(dice.uniform(0.0, 0.6))
    ranks[dice.randrange(2)].kill()
    time.sleep(dice.uniform(0.0, 0.05))
    for rank in ranks:
        rank.kill()
        rank.wait()
        rank.stdout.close()


def lose_nothing(kills, folder):
    dice = random.Random(kills)
    expected, last = Expected(), 0
    for _ in range(kills):
        kill_one_then_all(folder, dice)
        engine = check_folder(folder)
        assert engine.global_steps >= last, "a checkpoint was lost"
        last = engine.global_steps
        expected.check(engine)
        engine.destroy()
    assert last > 0
    assert len(list(folder.iterdir())) <= 5  # two checkpoints, `latest`, what the last kill cut off and one more


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_checkpoint(tmp_path):
    lose_nothing(int(os.environ.get("KILLS", "3")), tmp_path)
