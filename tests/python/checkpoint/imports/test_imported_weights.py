# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide checkpoint import` of Hugging Face folders: a checkpoint of weights, which any world and stage loads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from safetensors.torch import load_file, save_file
from test_weights import FORMS, logits_of, make_model, write
from torch import nn

import deeptide


def command(*words, code=0):
    """Runs `deeptide checkpoint import`; returns what it printed."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # where the command finds the python to run
    done = subprocess.run(
        [shutil.which("deeptide"), "checkpoint", "import", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == code, done.stderr
    return done.stdout.strip() if code == 0 else done.stderr


def test_entries_that_are_no_tensors_are_named(tmp_path):
    torch.save({"weight": torch.ones(2), "epoch": 3, "note": "a run"}, tmp_path / "model.pt")
    done = subprocess.run(
        [shutil.which("deeptide"), "checkpoint", "import", str(tmp_path / "model.pt"), str(tmp_path / "base")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert "left out, for they are no tensors: epoch, note; keep the file if you need them" in done.stderr


def load(world, folder, logits, stage, precision, how):
    """The logits are those that the weights gave, before a step and after one that changes nothing."""
    torch.set_num_threads(1)
    expected = torch.load(logits)
    model = make_model()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    with pytest.raises(deeptide.CheckpointError, match=r"has no optimizer states.*load_optimizer_states=False"):
        engine.load_checkpoint(folder)
    path, client_state = engine.load_checkpoint(folder, **{how: how == "load_module_only"})
    assert path == os.path.join(folder, "weights")
    assert client_state == {}
    assert engine.global_steps == 0
    tolerance = {"rtol": 0, "atol": 0} if precision == "fp32" else {"rtol": 0.05, "atol": 0.05}
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(logits_of(engine).float(), expected, **tolerance)
        engine.backward(logits_of(engine).sum())
        engine.step()


CASES = {  # form: (world, stage, precision, the flag that loads it)
    "safetensors": (3, 2, "fp32", "load_optimizer_states"),
    "safetensors-several": (2, 3, "bf16", "load_module_only"),
    "bin": (4, 1, "fp32", "load_module_only"),
    "bin-several": (1, 0, "fp32", "load_optimizer_states"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_imported_folder_loads_in_any_world_and_stage(tmp_path, form):
    model = make_model()
    if form == "bin-several":  # as save_pretrained cuts files: what is tied is in one of them
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    write(tmp_path / "model", model, form)
    if form == "bin-several":
        index = tmp_path / "model" / "pytorch_model.bin.index.json"
        places = json.loads(index.read_text())["weight_map"]
        del places["lm_head.weight"]
        index.write_text(json.dumps({"weight_map": places}))
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.save(logits_of(make_model()), tmp_path / "logits.pt")
    made = deeptide.import_checkpoint(tmp_path / "model", tmp_path / "made")
    assert made == str(tmp_path / "made" / "weights")
    assert deeptide.checkpoint.verify(tmp_path / "made") == []
    names = [tensor.name for tensor in deeptide.checkpoint.open(made).tensors]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names  # a tied weight is there once, under its first name
    world, *how = CASES[form]
    run_ranks(world, load, str(tmp_path / "made"), str(tmp_path / "logits.pt"), *how)


def test_every_type_and_order_of_elements_is_kept(tmp_path):
    torch.manual_seed(3)
    state = {
        "transposed": torch.randn(40, 70).t(),
        "strided": torch.randn(50, 60)[::2, ::3],
        "half": torch.randn(33).half(),
        "brain": torch.randn(5, 7).bfloat16(),
        "counts": torch.arange(9),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "safe").mkdir()
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "safe" / "model.safetensors")
    for form, source in (("bin", tmp_path / "bin"), ("safe", tmp_path / "safe" / "model.safetensors")):
        reader = deeptide.checkpoint.open(deeptide.import_checkpoint(source, tmp_path / "made", tag=form))
        assert sorted(tensor.name for tensor in reader.tensors) == sorted(state)
        for name, value in state.items():
            found = reader.read(reader.find(name))
            assert found.dtype == value.dtype, name
            assert torch.equal(found, value), name


@pytest.mark.costly
@pytest.mark.parametrize("end", ["", "/", "/.", "//./"])
def test_the_command_takes_any_spelling_of_a_folder(tmp_path, end):
    write(tmp_path / "model", make_model(), "safetensors")
    made = command(f"{tmp_path}/model{end}", f"{tmp_path}/made{end}", "--as", "base")
    assert made == str(tmp_path / "made" / "base")
    deeptide.checkpoint.export(made, tmp_path / "out")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def spoil_cut(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name, "it ends within 'transformer."


def spoil_missing_file(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "index.json", "it places 'transformer.", "' in model-00002-of-00003.safetensors, which is not there"


def spoil_missing_tensor(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["more"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    return path.name, "it places 'more' in model-00001-of-00003.safetensors, which does not have it"


def spoil_type(folder):
    path = folder / "model-00001-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"F31"', 1))
    return path.name, " at 'transformer.", "dtype 'F31' is not known"


@pytest.mark.parametrize("spoil", [spoil_cut, spoil_missing_file, spoil_missing_tensor, spoil_type])
def test_errors_name_file_and_tensor(tmp_path, spoil):
    write(tmp_path / "model", make_model(), "safetensors-several")
    words = spoil(tmp_path / "model")
    with pytest.raises(deeptide.CheckpointError) as caught:
        deeptide.import_checkpoint(tmp_path / "model", tmp_path / "made")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_imported_is_told(tmp_path):
    with pytest.raises(deeptide.CheckpointError, match=r"no checkpoint in .*nor weights"):
        deeptide.import_checkpoint(tmp_path, tmp_path / "made")
    (tmp_path / ".metadata").touch()
    with pytest.raises(deeptide.CheckpointError, match=r"it is one of torch\.distributed\.checkpoint"):
        deeptide.import_checkpoint(tmp_path, tmp_path / "made")
    assert not Path(tmp_path, "made").exists()
