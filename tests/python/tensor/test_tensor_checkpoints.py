# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and exports have the whole model's names and shapes, whoever shares its layers."""

import json
import struct

import cut
import models
import pytest
import torch
from conftest import run_ranks

import deeptide

BEFORE, AFTER = 2, 2


class Fused(models.TinyModel):
    """TinyModel with a fused layer, cut by blocks, that is odd along dimension 1 of what takes it."""

    def __init__(self):
        super().__init__()
        self.fused, self.out = torch.nn.Linear(20, 18, bias=False), torch.nn.Linear(6, 20)

    def forward(self, tokens, targets):
        q, k, v = self.fused(self.embed(tokens)).chunk(3, -1)
        x = self.embed(tokens) + self.out(q * k.tanh() + v)
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


SPECS = [
    *cut.SPECS,
    {"patterns": [r"fused\.weight"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r"out\.weight"], "partition_type": "row"},
]


def start(world, stage, tensor, seed=0, **more):
    return cut.start(world, cut.config(stage, tensor, specs=SPECS, **more), kind=Fused, seed=seed)


def whole_states(engine):
    """Masters and moments, joined."""
    roles = ("master", "exp_avg", "exp_avg_sq")
    return {f"{name}/{role}": value for role in roles for name, value in cut.whole(engine, role).items()}


def save(world, folder, stage, tensor, more):
    engine = start(world, stage, tensor, **more)
    cut.steps(engine, BEFORE)
    engine.save_checkpoint(folder, client_state={"note": 7})
    engine._core.export_safetensors(f"{folder}/weights.safetensors")
    states, weights = whole_states(engine), engine.module_state_dict()
    return states, weights, cut.steps(engine, AFTER, begin=BEFORE)


def load(world, folder, stage, tensor, more):
    engine = start(world, stage, tensor, seed=9, **more)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    assert client_state == {"note": 7}
    states = whole_states(engine)
    assert engine.global_steps == BEFORE
    return states, engine.module_state_dict(), cut.steps(engine, AFTER, begin=BEFORE)


def names_and_shapes(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


# (ranks, tensor) of who saves and who loads: the batches are equal where ranks / tensor is.
@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (2, 1), (3, 3)], ids=str)
@pytest.mark.parametrize(
    ("saved", "taken"),
    [((4, 2), (2, 1)), ((2, 1), (4, 2)), ((2, 2), (1, 1)), ((1, 1), (3, 3)), ((3, 3), (2, 2)), ((4, 2), (2, 2))],
    ids=str,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_loads_wherever_layers_are_cut(tmp_path, saved, taken, stages, bf16):
    before = run_ranks(saved[0], save, str(tmp_path), stages[0], saved[1], {"bf16": bf16})
    after = run_ranks(taken[0], load, str(tmp_path), stages[1], taken[1], {"bf16": bf16})
    for states, weights, _ in after:
        models.assert_same(states, before[0][0])
        models.assert_same(weights, before[0][1])
    if saved[0] // saved[1] == taken[0] // taken[1]:
        for (losses, norms), expected in ((after[0][2], before[0][2]),):
            cut.near(losses, expected[0], 2e-2 if bf16 else 1e-5, "losses")
            cut.near(norms, expected[1], 5e-2 if bf16 else 1e-4, "norms")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_bit_for_bit_on_the_same_mesh(tmp_path, stage):
    before = run_ranks(4, save, str(tmp_path), stage, 2, {})
    after = run_ranks(4, load, str(tmp_path), stage, 2, {})
    assert [result[2] for result in after] == [result[2] for result in before]


def test_an_export_is_the_whole_model(tmp_path):
    results = run_ranks(4, save, str(tmp_path), 3, 2, {})
    whole = {name: tuple(value.shape) for name, value in Fused().state_dict().items()}
    assert {name: tuple(value.shape) for name, value in results[0][1].items()} == whole
    found = names_and_shapes(tmp_path / "weights.safetensors")
    assert found == {name: shape for name, shape in whole.items() if name in found}
    model = models.make_model(kind=Fused, seed=4)
    deeptide.load_weights(model, str(tmp_path / "weights.safetensors"))
    models.assert_same(dict(model.state_dict()), results[0][1])


def test_saves_beside_training_are_whole_too(tmp_path):
    def run(world):
        engine = start(world, 2, 2)
        cut.steps(engine, BEFORE)
        states = whole_states(engine)
        engine.save_checkpoint(str(tmp_path), client_state={"note": 7}, blocking=False)
        cut.steps(engine, AFTER, begin=BEFORE)
        engine.wait_for_save()
        return states

    before = run_ranks(4, run)
    after = run_ranks(2, load, str(tmp_path), 1, 1, {})
    models.assert_same(after[0][0], before[0])
