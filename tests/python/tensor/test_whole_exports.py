# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Exports, and saves without frozen parameters, of stages and of shared layers are those of the unsplit model."""

import meshes
import models
import pytest
import torch
from conftest import run_ranks
from test_tensor_checkpoints import names_and_shapes

import deeptide


def frozen(world, kind, settings, seed=3):
    model = meshes.make(kind, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name)
    return deeptide.initialize(model=model, config=settings, world=world)[0]


def export(world, folder, kind, settings):
    engine = frozen(world, kind, settings)
    meshes.steps(engine, kind, 1)
    assert engine.save_16bit_model(folder, "all.safetensors")
    assert engine.save_16bit_model(folder, "trained.safetensors", exclude_frozen_parameters=True)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    return dict(engine.whole_state_dict()), meshes.states(engine)


def load_without_frozen(world, folder, kind, settings):
    engine = frozen(world, kind, settings, seed=9)
    engine.load_checkpoint(folder)
    return dict(engine.whole_state_dict()), meshes.states(engine)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (2, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_exports_are_the_unsplit_model(tmp_path, mesh, stage, kind):
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    pipeline, data, tensor = mesh
    settings = meshes.config(kind, stage, pipeline, tensor, zero=dict(zero))
    results = run_ranks(pipeline * data * tensor, export, str(tmp_path), kind, settings)
    found, own = results[0][0], meshes.make(kind)
    assert all(result[0] == {} for result in results[1:])
    shapes = {name: tuple(value.shape) for name, value in own.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in found.items() if name in shapes} == shapes
    for name, value in meshes.union(result[1] for result in results).items():
        if name.endswith("/master"):
            assert torch.equal(found[name.removesuffix("/master")], value), name
    deeptide.load_weights(own, str(tmp_path / "all.safetensors"))
    models.assert_same({name: found[name] for name in shapes}, dict(own.state_dict()))
    names = set(names_and_shapes(tmp_path / "trained.safetensors"))
    assert {name for name in shapes if name not in names} == {name for name in shapes if "down_proj" in name}

    before, after = meshes.make(kind, 9).state_dict(), run_ranks(1, load_without_frozen, *_loads(tmp_path, kind))[0]
    for name in shapes:
        assert torch.equal(after[0][name], before[name] if "down_proj" in name else found[name]), name


def _loads(folder, kind):
    return str(folder), kind, meshes.config(kind, 1)
