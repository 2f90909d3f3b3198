# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""get_extra_state: saved, restored and exported beside parameters and buffers, as torch's state_dict has it."""

import fractions
import json
import os

import models
import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide._engine import checkpoint as _checkpoint


class Counting(torch.nn.Module):
    """Keeps a history beside its parameters."""

    def __init__(self):
        super().__init__()
        self.seen = {"count": 0, "last": torch.zeros(2)}

    def forward(self, x):
        self.seen = {"count": self.seen["count"] + 1, "last": x.detach().flatten()[:2].clone()}
        return x

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Packed(Counting):
    """Keeps it as a tensor of bytes, as libraries of fp8 layers do."""

    def get_extra_state(self):
        return torch.frombuffer(bytearray(json.dumps(self.seen["count"]).encode()), dtype=torch.uint8)

    def set_extra_state(self, state):
        self.seen = {**self.seen, "count": json.loads(bytes(state.tolist()))}


class Model(torch.nn.Module):
    def __init__(self, kind=Counting):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = torch.nn.Sequential(kind(), torch.nn.Linear(4, 1))
        self.again = self.inner[0]  # one module, two names

    def forward(self, x):
        return self.inner(self.first(x)).square().mean()


KEYS = {"inner.0._extra_state", "again._extra_state"}


def start(world=None, stage=0, kind=Counting):
    model = models.make_model(kind=lambda: Model(kind))
    return deeptide.initialize(model=model, config=models.config(stage), world=world)[0]


def train(engine, steps):
    for step in range(steps):
        engine.backward(engine(torch.full((2, 4), 1.0 + step + engine.global_rank)))
        engine.step()


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("module_only", [False, True])
def test_a_checkpoint_gives_back_what_rank_0_had(stage, module_only, tmp_path):
    def run(world):
        engine = start(world, stage)
        train(engine, 3)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        saved = engine.module.again.seen
        train(engine, 1)
        other = start(world, stage)
        _, client_state = other.load_checkpoint(tmp_path, load_module_only=module_only)
        assert client_state == {"epoch": 1}
        engine.destroy()
        return saved, other.module.again.seen

    ranks = run_ranks(2, run)
    assert not torch.equal(ranks[0][0]["last"], ranks[1][0]["last"])
    for _, loaded in ranks:
        assert loaded["count"] == 3
        assert torch.equal(loaded["last"], ranks[0][0]["last"])


@pytest.mark.parametrize("kind", [Counting, Packed])
def test_the_module_state_has_torchs_keys_and_loads_into_torchs_module(kind):
    engine = start(kind=kind)
    train(engine, 2)
    state = engine.module_state_dict()
    assert state.keys() == engine.module.state_dict().keys() >= KEYS
    plain = Model(kind)
    plain.load_state_dict(state)
    assert plain.again.seen["count"] == 2


def test_a_module_with_two_names_is_asked_once():
    engine = start()
    state = engine.module_state_dict()
    assert state["again._extra_state"] is state["inner.0._extra_state"]


def test_an_export_has_the_states_that_are_tensors(tmp_path, recwarn):
    engine = start(kind=Packed)
    train(engine, 2)
    engine.save_16bit_model(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["again._extra_state"]["dtype"] == "U8"
    assert not recwarn.list


def test_an_export_leaves_other_states_out_and_says_so_once(tmp_path, recwarn):
    engine = start()
    for _ in range(2):
        engine.save_16bit_model(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert not KEYS & header.keys()
    lines = [str(warning.message) for warning in recwarn.list]
    assert len(lines) == 2
    for key in KEYS:
        assert sum(f"'{key}'" in line and "returned dict" in line for line in lines) == 1


class Unsafe(Counting):
    def get_extra_state(self):
        return {"ratio": fractions.Fraction(1, 3)}


class Unpicklable(Counting):
    def get_extra_state(self):
        return lambda: 0


@pytest.mark.parametrize(("kind", "text"), [(Unsafe, "is dict.*Fraction"), (Unpicklable, "is function")])
def test_a_state_that_could_not_be_read_back_is_refused_by_name(kind, text, tmp_path):
    engine = start(kind=kind)
    with pytest.raises(deeptide.ConfigError, match=rf"'inner\.0\._extra_state'.*{text}"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_class_that_the_program_calls_safe_is_saved_and_refused_where_it_is_not(tmp_path):
    engine = start(kind=Unsafe)
    with torch.serialization.safe_globals([fractions.Fraction]):
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    assert engine.module.again.seen == {"ratio": fractions.Fraction(1, 3)}
    with pytest.raises(deeptide.CheckpointError, match=r"add_safe_globals.*Fraction"):
        engine.load_checkpoint(tmp_path)


class Plain(Counting):
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


class Twice(Model):
    def __init__(self):
        super().__init__()
        self.more = Counting()


def load(kind, folder, **options):
    engine = deeptide.initialize(model=models.make_model(kind=kind), config=models.config(0))[0]
    engine.load_checkpoint(folder, **options)
    return engine.module


def test_a_strict_load_names_what_does_not_fit(tmp_path):
    engine = start()
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    text = "'more._extra_state' is not in the checkpoint"
    with pytest.raises(deeptide.CheckpointError, match=text):
        load(Twice, tmp_path)
    with pytest.warns(deeptide.DeeptideWarning, match=text):
        assert load(Twice, tmp_path, load_module_strict=False).again.seen["count"] == 2
    with pytest.raises(deeptide.CheckpointError, match=r"no module that takes 'inner\.0\._extra_state'"):
        load(lambda: Model(Plain), tmp_path)


def test_a_checkpoint_without_any_loads_and_says_so(tmp_path):
    start(kind=Plain).save_checkpoint(tmp_path)
    with pytest.warns(deeptide.DeeptideWarning, match=r"'again\._extra_state' is not in the checkpoint"):
        assert load(Model, tmp_path).again.seen["count"] == 0


def test_a_model_without_any_adds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpoint, "_pack", None)  # a call would fail
    path = start(kind=Plain).save_checkpoint(tmp_path)
    with open(os.path.join(path, "manifest.json")) as file:
        assert "extra_state" not in file.read()
