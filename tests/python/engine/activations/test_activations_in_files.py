# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Activations go to files and come back for backward: the same bits, less memory, and errors that say where."""

import resource

import models
import pytest
import test_activations
import torch
from conftest import run_processes, run_ranks
from test_activations import MICRO, Deep, Living, alone, compare
from test_activations_of_programs import Checkpointing

import deeptide
from deeptide.activations import policy as policies
from deeptide.activations.spill import BLOCK_BYTES, Rates

LENGTH = 64  # tensors of 10 KiB: smaller ones than 4 KiB stay
FREE, DEAR = Rates(0.0, 0.0, 0.0), Rates(1.0, 1.0, 1.0)


def files(folder, **more):
    return {"policy": "files", "nvme_path": str(folder), **more}


def train(world, config, activations):
    return test_activations.train(world, models.TinyModel, config, activations, lengths=[LENGTH] * world.size)


def both(config, activations, ranks=2):
    trained = run_ranks(ranks, train, config, activations)
    compare(trained, run_ranks(ranks, train, config, None))
    return [choice for _, _, choice in trained]


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.both_ways
def test_files_change_no_bit(stage, gas, precision, tmp_path):
    config = models.config(stage, gas=gas, bf16=precision == "bf16", fp16={"enabled": precision == "fp16"})
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    for choice in both(config, files(tmp_path)):
        assert choice.in_files == choice.blocks == ["h.0", "h.1", "h.2"]
        width, rows = 20, MICRO * LENGTH
        least = 3 * rows * (2 * width + 2 * 3 * width) * (4 if precision == "fp32" else 2)
        assert least <= choice.file_bytes <= 1.6 * least
        assert "keep goes to files until backward" in str(choice)
    assert not any(tmp_path.iterdir())  # they have no names


def budgeted(folder, memory):
    return {"policy": "auto", "memory": memory, "nvme_path": [str(folder / "a"), str(folder / "b")], "buffer_count": 4}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rates", [FREE, DEAR], ids=["free", "dear"])
def test_a_budget_takes_files_where_they_are_faster_than_recomputation(stage, rates, tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "measure", lambda *_: rates)
    room = 220 << 10  # of activations, which take 300 KiB with all blocks kept; 16 MiB more pass to files and back
    memory = room + (4 * BLOCK_BYTES if rates is FREE else 0)
    config = models.config(stage, gas=2)
    for choice in both(config, budgeted(tmp_path, memory)):
        chosen, other = (choice.in_files, choice.recomputed) if rates is FREE else (choice.recomputed, choice.in_files)
        assert 0 < len(chosen) < 3 and not other
        assert room / 2 < choice.predicted_bytes <= choice.budget_bytes
        assert (choice.file_bytes > 0) == (rates is FREE)


def test_a_choice_that_is_loaded_replaces_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "measure", lambda *_: FREE)
    config = models.config(0, activation_checkpointing=budgeted(tmp_path, 4 * BLOCK_BYTES + (220 << 10)))
    engine = deeptide.initialize(model=models.make_model(), config=config, world=alone())[0]
    engine.backward(engine(*models.batches(1, MICRO, length=LENGTH)[0]))
    engine.step()
    activations = engine._activations
    state = activations.state_dict()
    names = state["choice"]["in_files"]
    assert names
    for in_files in ([], names):
        state["choice"] |= {"in_files": in_files, "recomputed": [] if in_files else names}
        activations.load_state_dict(state)
        modes = {block.name: block.mode for block in activations._blocks if block.mode != "keep"}
        assert modes == dict.fromkeys(names, "spill" if in_files else "recompute")
        before = activations.current().file_bytes
        engine.backward(engine(*models.batches(1, MICRO, length=LENGTH)[0]))
        engine.step()
        assert (activations.current().file_bytes > before) == bool(in_files)
    engine.destroy()


def test_the_rates_of_files_are_measured_and_agreed_on(tmp_path, monkeypatch):
    found, measure = [], policies.measure
    monkeypatch.setattr(policies, "measure", lambda *given: found.append(measure(*given)) or found[-1])
    first, other = both(models.config(0), budgeted(tmp_path, 4 * BLOCK_BYTES + (220 << 10)))
    assert len(found) == 2 and all(0 < rates.copying < 1e-6 and min(rates) >= 0 for rates in found)
    assert (first.in_files, first.recomputed) == (other.in_files, other.recomputed)


def test_a_block_hidden_behind_computing_costs_its_copies_only():
    rates = Rates(copying=1e-10, writing=1e-9, reading=1e-9)
    assert rates.seconds(10**6, forward=1e-3) == pytest.approx(1e-4)
    assert rates.seconds(10**7, forward=1e-3) == pytest.approx(1e-3 + 9e-3 + 8e-3)


def peak_of(activations):
    """(loss, bytes that live at most in forward and backward of the second step), of one rank."""
    extra = {"activation_checkpointing": activations} if activations else {}
    config = models.config(0, deeptide={"tune_allocator": False}, **extra)
    engine = deeptide.initialize(model=models.make_model(kind=Deep), config=config, world=alone())[0]
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with Living(engine.module) as living:
            loss = engine(x)
            engine.backward(loss)
        engine.step()
    engine.destroy()
    return loss.item(), living.most


def test_less_memory_is_alive(tmp_path):
    expected, kept = peak_of(None)
    loss, most = peak_of(files(tmp_path))
    assert loss == expected
    assert most - 8 * BLOCK_BYTES < kept / 2  # Living counts what passes through memory, too


def losses_of(activations, kind=models.TinyModel, compiles=False):
    extra = {"activation_checkpointing": activations} if activations else {}
    engine = deeptide.initialize(model=models.make_model(kind=kind), config=models.config(1, **extra), world=alone())[0]
    if compiles:
        engine.compile(backend="aot_eager")
    found = []
    for batch in models.batches(3, MICRO, length=LENGTH):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    choice = engine.activation_checkpointing()
    engine.destroy()
    return found, choice


@pytest.mark.costly
def test_a_compiled_model_gives_the_same_losses(tmp_path):
    found, choice = losses_of(files(tmp_path), compiles=True)
    assert found == pytest.approx(losses_of(None, compiles=True)[0], rel=1e-6)
    assert choice.file_bytes > 0


def test_blocks_that_the_program_recomputes_are_left_to_it(tmp_path):
    found, choice = losses_of(files(tmp_path), kind=Checkpointing)
    assert found == losses_of(None, kind=Checkpointing)[0]
    assert choice.file_bytes == 0


def test_a_step_after_an_error_of_the_drive_is_as_without(tmp_path):
    run_processes(1, fill_the_drive, str(tmp_path))


def fill_the_drive(folder):
    deeptide.init_distributed()
    engine = deeptide.initialize(
        model=models.make_model(), config=models.config(0) | {"activation_checkpointing": files(folder)}
    )[0]
    tokens, targets = models.batches(1, MICRO, length=LENGTH)[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with pytest.raises(RuntimeError, match=f"cannot reserve .* in '{folder}'"):
        engine(tokens, targets)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.backward(engine(tokens, targets))
    assert engine.step().grad_norm > 0
    engine.destroy()


@pytest.mark.parametrize(
    ("activations", "text"),
    [
        ({"policy": "files"}, 'policy is "files", and nvme_path is missing: give it a folder on the drive'),
        ({"policy": "host", "nvme_path": "/x"}, 'is for policy "files" or "auto", and policy is "host"'),
        ({"policy": "recompute", "nvme_path": ["/x"]}, 'is for policy "files" or "auto", and policy is "recompute"'),
        (files("/x", buffer_count=1), "buffer_count"),
    ],
)
def test_what_fits_no_policy_is_refused(activations, text):
    with pytest.raises(deeptide.ConfigError) as refused:
        deeptide.initialize(
            model=models.make_model(), config=models.config(0, activation_checkpointing=activations), world=alone()
        )
    assert text in str(refused.value)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"cannot make the folder in '.*file/sub'"):
        run_ranks(1, train, models.config(0), files(tmp_path / "file" / "sub"))
