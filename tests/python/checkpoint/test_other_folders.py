# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""load_checkpoint of a path that has no checkpoint of ours says what is there and what to do; none is silent."""

import re
import shutil

import models
import pytest
import torch
from conftest import run_ranks
from states import start, train

import deeptide


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, str(folder))
    return folder


def save(world, folder):
    engine = start(world, 1)
    train(engine)
    engine.save_checkpoint(folder, tag="one")


def refuse(world, folder, tag, text, options):
    engine = start(world, 1)
    before = engine.module_state_dict()
    with pytest.raises(deeptide.CheckpointError, match=text):
        engine.load_checkpoint(folder, tag=tag, **options)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name]), name
    train(engine)


def make_dcp(saved, out):
    deeptide.checkpoint.export(saved, out, "dcp")
    return out


def make_folder_of_dcp(saved, out):
    deeptide.checkpoint.export(saved, out / "step", "dcp")
    return out


def make_weights(saved, out):
    deeptide.checkpoint.export(saved, out, "safetensors")
    return out


def make_torch_weights(saved, out):
    deeptide.checkpoint.export(saved, out, "state_dict")
    return out


def make_file(saved, out):
    deeptide.checkpoint.export(saved, out, "state_dict")
    return out / "pytorch_model.bin"


def make_universal(saved, out):
    deeptide.checkpoint.export(saved, out, "universal")
    (out / "latest").unlink()
    return out


def make_universal_itself(saved, out):
    deeptide.checkpoint.export(saved, out, "universal")
    return out / (out / "latest_universal").read_text().strip()


def make_itself(saved, out):
    return saved / "one"


def make_itself_with_a_slash(saved, out):
    return f"{saved}/one/."


DCP = r"it is one of torch\.distributed\.checkpoint, which is not read here; load it with"
ALONE = r"it holds weights alone; load them with load_module_only=True.*deeptide checkpoint import"
CASES = {  # what is given: (makes it, tag, the error's text)
    "dcp": (make_dcp, None, DCP),
    "dcp by tag": (make_folder_of_dcp, "step", DCP),
    "weights": (make_weights, None, ALONE),
    "torch's weights": (make_torch_weights, None, ALONE),
    "a file": (make_file, None, ALONE),
    "universal": (make_universal, None, r'a universal one of DeepSpeed\'s; set "checkpoint": {"load_universal": true}'),
    "universal itself": (make_universal_itself, None, r"it is a checkpoint itself; give the folder that has it, .*tag"),
    "itself": (make_itself, None, r"it is a checkpoint itself; give .* and its tag, 'one'"),
    "itself/.": (make_itself_with_a_slash, None, r"it is a checkpoint itself; give .*saved\d*, and its tag, 'one'"),
    "a wrong tag": (lambda saved, out: saved, "two", r"no checkpoint 'two' in .*; it has the checkpoints 'one'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_there_instead_is_named(saved, tmp_path, case):
    make, tag, text = CASES[case]
    run_ranks(2, refuse, str(make(saved, tmp_path / "out")), tag, text, {})


def load_nothing(world, folder, capture):
    engine = start(world, 1)
    assert engine.load_checkpoint(folder) == (None, None)
    train(engine)


@pytest.mark.parametrize("case", ["missing", "empty", "logs", "no latest"])
def test_an_empty_folder_is_a_warning(saved, tmp_path, case, capfd):
    folder = tmp_path / "runs"
    if case != "missing":
        folder.mkdir()
    if case == "logs":
        (folder / "events.log").write_text("x")
    if case == "no latest":
        shutil.copytree(saved / "one", folder / "one")
    run_ranks(2, load_nothing, str(folder), None)
    lines = [line for line in capfd.readouterr().err.splitlines() if "no checkpoint in" in line]
    assert len(lines) == 1  # of rank 0
    assert re.search(
        r"load_checkpoint: no checkpoint in .*runs, which has no file 'latest'.*nothing was loaded", lines[0]
    )
    assert ("it has the checkpoints 'one': give one of these tags" in lines[0]) == (case == "no latest")


def load_file(world, path):
    engine = start(world, 2, models.make_model(9))
    engine.load_checkpoint(path, load_module_only=True)
    expected = torch.load(path)
    for name, value in engine.module_state_dict().items():
        if name in expected:  # a tied name is there once
            assert torch.equal(value, expected[name].to(value.dtype)), name


def test_a_file_of_weights_loads_alone(saved, tmp_path):
    run_ranks(2, load_file, str(make_file(saved, tmp_path / "out")))
