# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_states and reload_states: memory goes back to the system between steps, and no number changes."""

import os

import models
import pytest
import torch
from conftest import run_ranks
from test_packed_states import train

import deeptide
from deeptide.as_deepspeed.config.configuration import OffloadDeviceEnum, OffloadStateTypeEnum

STAGES = [0, 1, 2, 3]
MIB = 1 << 20


def config_of(stage, bf16=True, **own):
    return models.config(stage, bf16=bf16, deeptide=own)


def start(world, stage, bf16=True, model=None, **own):
    model = models.make_model() if model is None else model
    return deeptide.initialize(model=model, config=config_of(stage, bf16, **own), world=world)[0]


def files_under(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "packed", "bf16 moments"])
def test_a_run_with_phases_is_the_run(kind, stage, world, tmp_path):
    own = {"packed_states": kind == "packed", "moment_dtype": "bf16" if kind == "bf16 moments" else "fp32"}

    def run(world, phases):
        engine = start(world, stage, kind != "fp32", **own)
        losses = []
        for phase in range(3):
            losses += train(engine, 2 * phase, 2 * phase + 2)
            if phases:
                before = models.everything(engine)
                engine.offload_states(device="nvme", nvme_path=str(tmp_path))
                with torch.no_grad():
                    engine(*models.batches(1, 2)[0])  # parameters stay
                models.assert_same(models.everything(engine), before)  # states are read where they lie
                engine.reload_states()
        return losses, models.everything(engine)

    for (losses, state), (plain, plain_state) in zip(
        run_ranks(world, run, True), run_ranks(world, run, False), strict=True
    ):
        assert losses == plain
        models.assert_same(state, plain_state)
    assert files_under(tmp_path) == []


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("packed", [False, True])
def test_memory_goes_back_to_the_system_and_the_table_stays_true(packed, tmp_path):
    model = models.make_model(kind=lambda: models.Wide(width=2000))  # 12 M parameters
    engine = start(None, 1, model=model, packed_states=packed)
    engine.backward(engine(torch.ones(2, 2000).bfloat16()))
    engine.step()
    before, numel = resident_bytes(), sum(p.numel() for p in model.parameters())
    engine.offload_states(device="nvme", nvme_path=[str(tmp_path / "a"), str(tmp_path / "b")])
    freed = before - resident_bytes()
    states = numel * (10 if packed else 12)
    assert freed > 0.9 * (states - 12 * MIB), f"{freed / MIB:.0f} MiB of {states / MIB:.0f}"
    engine.reload_states()
    engine.backward(engine(torch.ones(2, 2000).bfloat16()))
    engine.step()
    line = next(line for line in engine.memory() if line.role == "optimizer states")
    assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02)
    assert line.measured_bytes <= states * 1.01 + 13 * MIB


@pytest.mark.parametrize(
    ("include", "moments", "masters"),
    [
        (["optim_states"], True, False),
        ([OffloadStateTypeEnum.hp_params], False, True),
        (["lp_grads", "contiguous_grad_buffer"], False, False),
        ([OffloadStateTypeEnum.optim_states, "hp_params"], True, True),
    ],
)
def test_include_chooses_what_moves(include, moments, masters, tmp_path, capfd):
    engine = start(None, 1)
    train(engine, 0, 2)
    each = {line.role: line.measured_bytes for line in engine.memory()}["optimizer states"] / 12 / 1024
    capfd.readouterr()
    engine.offload_states(include, OffloadDeviceEnum.nvme, nvme_path=str(tmp_path))
    left = each * (12 - 8 * moments - 4 * masters)
    told = f"{left:.1f} KiB of {each * 12:.1f} KiB" if left else f"0 bytes of {each * 12:.1f} KiB"
    assert f"{told} of optimizer states stay in memory" in capfd.readouterr().err
    engine.reload_states()
    train(engine, 2, 3)


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_before_reload_states_names_the_call_and_keeps_the_gradients(stage, tmp_path):
    def run(world, phases):
        engine = start(world, stage)
        train(engine, 0, 1)
        if phases:
            engine.offload_states(device="nvme", nvme_path=str(tmp_path))
        tokens, targets = models.batches(1, 2 * world.size)[0]
        engine.backward(engine(tokens[2 * world.rank :][:2], targets[2 * world.rank :][:2]))
        if phases:
            with pytest.raises(ValueError, match=r"states are offloaded; call reload_states\(\) first, on all ranks"):
                engine.step()
            engine.reload_states()
        assert engine.step()
        return models.everything(engine)

    models.assert_same(run_ranks(2, run, True)[0], run_ranks(2, run, False)[0])


@pytest.mark.both_ways
def test_checkpoints_are_written_and_read_meanwhile(tmp_path):
    def run(world):
        engine = start(world, 2, packed_states=True)
        train(engine, 0, 2)
        saved = models.everything(engine)
        engine.offload_states(device="nvme", nvme_path=str(tmp_path / "swap"))
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.reload_states()
        train(engine, 2, 3)
        engine.offload_states(device="nvme", nvme_path=str(tmp_path / "swap"))
        engine.load_checkpoint(str(tmp_path / "saved"))
        engine.reload_states()
        return saved, models.everything(engine)

    for saved, loaded in run_ranks(2, run):
        models.assert_same(loaded, saved)


def test_the_configurations_folder_is_the_default(tmp_path):
    engine = start(None, 1, placement={"nvme_path": str(tmp_path / "swap")})
    train(engine, 0, 1)
    engine.offload_states(device="nvme")
    assert (tmp_path / "swap").is_dir()
    engine.reload_states()
    train(engine, 1, 2)


def test_a_cpu_engines_states_are_in_the_hosts_memory_already(capfd):
    engine = start(None, 1)
    train(engine, 0, 1)
    engine.offload_states()
    assert '"cpu" leaves them; device "nvme" with an nvme_path moves them to files' in capfd.readouterr().err
    engine.backward(engine(*models.batches(1, 2)[0]))
    with pytest.raises(ValueError, match="call reload_states"):
        engine.step()
    engine.reload_states(non_blocking=True)
    assert engine.step()


def test_a_full_disk_is_an_error_on_all_ranks_and_training_goes_on(mount_disk):
    small = mount_disk("4m")

    def run(world):
        engine = start(world, 1, model=models.make_model(kind=models.Wide))
        x = torch.ones(2, 1100).bfloat16()
        engine.backward(engine(x))
        engine.step()
        before = models.everything(engine)
        with pytest.raises(RuntimeError, match=r"offload_states: .*All states are in memory again"):
            engine.offload_states(device="nvme", nvme_path=str(small))
        models.assert_same(models.everything(engine), before)
        engine.backward(engine(x))
        assert engine.step()

    run_ranks(2, run)


def between_backward_and_step(engine):
    engine.backward(engine(*models.batches(1, 2)[0]))
    engine.offload_states()


def twice(engine):
    engine.offload_states()
    engine.offload_states()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (between_backward_and_step, r"between backward\(\) and step\(\).*call step\(\) first"),
        (twice, "offloaded already"),
        (lambda engine: engine.reload_states(), "no states are offloaded"),
        (lambda engine: engine.offload_states(device="nvme"), "needs nvme_path"),
        (lambda engine: engine.offload_states(device="disk"), r"device is 'disk', expected \"cpu\" or \"nvme\""),
        (lambda engine: engine.offload_states(["lp_params"]), 'include has "lp_params", but parameters stay'),
        (lambda engine: engine.offload_states(["moments"]), "include has 'moments', expected some of"),
    ],
)
def test_what_cannot_be_done_is_refused(act, words):
    engine = start(None, 1)
    train(engine, 0, 1)
    with pytest.raises(ValueError, match=words):
        act(engine)


def test_settings_that_keep_states_elsewhere_are_refused(tmp_path):
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    rewind = {"on_skipped": "rewind"}
    for config, words in (
        (models.config(1, zero=nvme), "keeps optimizer states in files already"),
        (models.config(1, deeptide=rewind), 'on_skipped "rewind" keeps a copy'),
    ):
        engine = deeptide.initialize(model=models.make_model(), config=config)[0]
        with pytest.raises(ValueError, match=words):
            engine.offload_states()
    model, config = models.make_model(), models.config(1)
    del config["optimizer"]
    own = torch.optim.NAdam(model.parameters(), lr=1e-3)
    engine = deeptide.initialize(model=model, config=config, optimizer=own)[0]
    with pytest.raises(ValueError, match=r"for the optimizers of deeptide: torch\.optim\.NAdam, your own"):
        engine.offload_states()
    engine = deeptide.initialize(model=models.make_model(), config=config)[0]
    with pytest.raises(ValueError, match="this engine has no optimizer"):
        engine.offload_states()
