# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of Hugging Face folders: safetensors and pytorch_model.bin, one file or several, into any world."""

import json
import os

import pytest
import torch
from conftest import run_processes, run_ranks
from safetensors.torch import save_file
from torch import nn

import deeptide

FORMS = ("safetensors", "safetensors-several", "bin", "bin-several")


def make_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=12, n_embd=24, n_layer=2, n_head=2)).eval()


def write(folder, model, form):
    """Writes like save_pretrained: tied weights once in safetensors, under both names in torch's files."""
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(model.state_dict())
    kind, several = form.split("-")[0], form.endswith("several")
    name = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    if kind == "safetensors":
        state.pop("lm_head.weight", None)
    save = save_file if kind == "safetensors" else torch.save
    if not several:
        save(state, folder / name)
        return
    names, places = sorted(state), {}
    for part in range(3):
        file = f"{name.split('.')[0]}-{part + 1:05}-of-00003.{name.split('.')[1]}"
        held = names[part::3]
        save({key: state[key] for key in held}, folder / file)
        places.update(dict.fromkeys(held, file))
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))


def logits_of(model):
    return model(torch.arange(24).remainder(61).view(2, 12)).logits


def check_logits(world, folder, stage, way):
    expected = torch.load(os.path.join(folder, "logits.pt"))
    if way == "before":
        model = make_model()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        assert deeptide.load_weights(model, folder).missing == []
    elif way == "init":
        with deeptide.zero.Init():
            model = make_model()
            assert deeptide.load_weights(model, folder).missing == []
    else:
        model = make_model()
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
    }
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    if way == "engine":
        engine.load_checkpoint(folder, load_module_only=True)
    for _ in range(2):  # masters too: a step publishes them
        with torch.no_grad():
            assert torch.equal(logits_of(engine), expected)
        engine.backward(logits_of(engine).sum())
        engine.step()


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_are_the_same(tmp_path, form):
    model = make_model()
    write(tmp_path, model, form)
    with torch.no_grad():
        torch.set_num_threads(1)
        torch.save(logits_of(model), tmp_path / "logits.pt")
    if form.startswith("safetensors"):
        run_ranks(2, check_logits, str(tmp_path), 3, "engine")
    run_ranks(1, check_logits, str(tmp_path), 0, "before")
    if form in ("safetensors", "bin-several"):
        run_ranks(2, check_logits, str(tmp_path), 3, "init")


def test_a_running_engine_takes_tied_weights_of_torch_files(tmp_path):
    model = make_model()
    write(tmp_path, model, "bin")
    with torch.no_grad():
        torch.set_num_threads(1)
        torch.save(logits_of(model), tmp_path / "logits.pt")
    run_ranks(2, check_logits, str(tmp_path), 3, "engine")


def count_bytes(folder):
    model = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 300))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam"}}
    engine, *_ = deeptide.initialize(model=model, config=config)
    before = read_bytes()
    engine.load_checkpoint(folder, load_module_only=True)
    print("BYTES", read_bytes() - before)
    expected = torch.load(os.path.join(folder, "pytorch_model.bin"))
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, expected[name]), name


def read_bytes():
    """By read calls of this process so far."""
    with open("/proc/self/io") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_each_rank_reads_its_own_bytes(tmp_path, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 300))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    if form == "safetensors":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    total = 4 * sum(parameter.numel() for parameter in model.parameters())
    ranks = run_processes(2, count_bytes, str(tmp_path))
    for rank in ranks:
        read = next(int(line.split()[1]) for line in rank.stdout.splitlines() if line.startswith("BYTES"))
        assert read < 0.55 * total + 65_536
    assert total > 1_000_000


def initialize_from(folder, form, precision):
    """Each rank has a file of its own, full of its number: values tell whose file they were read from."""
    rank = int(os.environ["RANK"])
    with deeptide.zero.Init():
        model = nn.Sequential(nn.Linear(300, 400, bias=False), nn.Linear(400, 500, bias=False))
        assert deeptide.load_weights(model, os.path.join(folder, str(rank))) == ([], [])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam"},
        "deeptide": {"shared_memory": False, "unit_size": 1},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    engine, *_ = deeptide.initialize(model=model, config=config)
    for name, value in engine.module_state_dict().items():
        whose = value.float().flatten()
        assert whose.unique().tolist() == [1.0, 2.0, 3.0, 4.0], name
        assert (whose.diff() >= 0).all(), name
        assert whose.long().bincount().max() <= len(whose) / 4 + 64, name  # units are padded


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_each_rank_reads_its_own_slices_under_zero_init(tmp_path, form, precision):
    for rank in range(4):
        folder = tmp_path / str(rank)
        folder.mkdir()
        state = {"0.weight": torch.full((400, 300), rank + 1.0), "1.weight": torch.full((500, 400), rank + 1.0)}
        if form == "bin":
            torch.save(state, folder / "pytorch_model.bin")
        else:
            save_file(state, folder / "model.safetensors")
    run_processes(4, initialize_from, str(tmp_path), form, precision)


def initialize_from_memory(world, stage):
    """Ranks that copy different values, of no file, get rank 0's."""
    torch.manual_seed(world.rank)
    with deeptide.zero.Init():
        model = nn.Linear(300, 400)
    with torch.no_grad():
        model.weight.copy_(torch.full((400, 300), 5.0 + world.rank))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam"},
        "deeptide": {"shared_memory": False},
    }
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    assert engine.module_state_dict()["weight"].unique().tolist() == [5.0]


def test_values_of_no_file_are_rank_0s():
    run_ranks(2, initialize_from_memory, 3)


def initialize_from_two_files(world, folder):
    """Ranks whose files differ in size get rank 0's."""
    with deeptide.zero.Init():
        model = nn.Linear(300, 400)
        deeptide.load_weights(model, os.path.join(folder, str(world.rank)), strict=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam"},
        "deeptide": {"shared_memory": False},
    }
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    assert engine.module_state_dict()["weight"].unique().tolist() == [0.0]


def test_files_that_differ_between_ranks_are_rank_0s(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        state = {"weight": torch.full((400, 300), float(rank)), "bias": torch.zeros(400)}
        more = {"another": torch.zeros(100 * rank + 1)}
        save_file({**more, **state}, tmp_path / str(rank) / "model.safetensors")
    run_ranks(2, initialize_from_two_files, str(tmp_path))


@pytest.mark.parametrize("way", ["base into head", "head into base"])
@pytest.mark.parametrize("form", ["safetensors", "bin-several"])
def test_a_base_models_weights_fit_a_model_with_a_head_and_back(tmp_path, way, form):
    """Names are without the head model's prefix, or with it; from_pretrained takes both."""
    torch.manual_seed(1)
    source, target = make_model(), make_model()
    for parameter in target.parameters():
        nn.init.constant_(parameter, 0.5)
    if way == "base into head":
        source, taken = source.transformer, target.transformer
    else:
        target, taken = target.transformer, target.transformer
    write(tmp_path, source, form)
    deeptide.load_weights(target, str(tmp_path), strict=False)
    expected = dict(getattr(source, "transformer", source).named_parameters())
    got = dict(taken.named_parameters())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_other_weights_are_refused_by_name(tmp_path):
    torch.save({"weight": torch.ones(2, 3), "extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    model = nn.Linear(3, 2)
    with pytest.raises(deeptide.CheckpointError, match=r"they lack 'bias', and the model lacks 'extra'"):
        deeptide.load_weights(model, tmp_path)
    assert deeptide.load_weights(model, tmp_path, strict=False) == (["bias"], ["extra"])
    assert model.weight.tolist() == torch.ones(2, 3).tolist()
    with pytest.raises(deeptide.CheckpointError, match=r"has shape \(3, 2\) in the model and \(2, 3\) in"):
        deeptide.load_weights(nn.Linear(2, 3), tmp_path, strict=False)


def refuse(world, folder):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    engine, *_ = deeptide.initialize(model=nn.Linear(3, 2), config=config, world=world)
    before = engine.module_state_dict()
    with pytest.raises(deeptide.CheckpointError, match=r"(?s)missing in the checkpoint: 'bias/.*unexpected.*'extra/"):
        engine.load_checkpoint(folder, load_module_only=True)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name])


def test_a_parameter_without_a_value_is_an_error_with_its_name(tmp_path):
    torch.save({"weight": torch.ones(2, 3), "extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    run_ranks(2, refuse, str(tmp_path))
