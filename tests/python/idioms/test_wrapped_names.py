# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers leave no trace in names: what a wrapped model saves, the plain one loads, and the other way round."""

import models
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import deeptide
from deeptide import utils
from deeptide._model.names import namer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def plain(model):
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_layers(model):
    for place in range(3):
        model.layers[place] = torch.compile(model.layers[place], backend="eager")
    return model


def recomputed_layers(model):
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(checkpoint_wrapper(model.layers[1]), backend="eager")
    return model


def data_parallel(model):
    return nn.DataParallel(model)


WRAPPERS = [compiled, compiled_layers, recomputed_layers, data_parallel]


def start(wrap, stage):
    model = wrap(models.make_model(kind=Net))
    return deeptide.initialize(model=model, config=models.config(stage))[0]


def train(engine, steps):
    for step in range(steps):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_saved_and_loaded_as_the_plain_one(wrap, stage, tmp_path):
    wrapped = start(wrap, stage)
    train(wrapped, 2)
    wrapped.save_checkpoint(tmp_path / "wrapped")
    found = wrapped.module_state_dict()
    assert set(found) == set(models.make_model(kind=Net).state_dict())
    first = next(wrapped.module.parameters())
    assert torch.equal(utils.safe_get_full_fp32_param(first), found["layers.0.weight"])
    bare = start(plain, stage)
    bare.load_checkpoint(tmp_path / "wrapped")
    assert all(torch.equal(value, found[name]) for name, value in bare.module_state_dict().items())
    train(bare, 2)
    bare.save_checkpoint(tmp_path / "plain")
    wrapped.load_checkpoint(tmp_path / "plain")
    found = wrapped.module_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in bare.module_state_dict().items())
    if stage == 0:
        wrapped.save_16bit_model(tmp_path, "model.safetensors")
        loaded = deeptide.load_weights(compiled(Net()), tmp_path / "model.safetensors")
        assert not loaded.missing and not loaded.unexpected


def test_a_programs_own_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    assert namer(model)("module.module.weight") == "module.module.weight"
    wrapped = nn.DataParallel(model)
    assert namer(wrapped)("module.module.module.weight") == "module.module.weight"


def in_ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def in_fsdp(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def layer_in_fsdp(model):
    model.layers[1] = FullyShardedDataParallel(model.layers[1], use_orig_params=True, device_id=torch.device("cpu"))
    return model


def fully_sharded(model):
    return fully_shard(model)


OTHER_ENGINES = {
    in_ddp: "model: it is wrapped in DistributedDataParallel, which sums gradients over the ranks itself",
    in_fsdp: "model: it is wrapped in FullyShardedDataParallel",
    layer_in_fsdp: r"model: 'layers\.1' is wrapped in FullyShardedDataParallel.*give the module that it wraps",
    fully_sharded: r"parameter 'layers\.0\.weight' is a DTensor.*give the whole model",
}


def given_to_initialize(number):
    wrap, message = list(OTHER_ENGINES.items())[number]
    dist.init_process_group("gloo")
    with pytest.raises(deeptide.ConfigError, match=message):
        deeptide.initialize(model=wrap(Net()), config=models.config(0))
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(len(OTHER_ENGINES)))
def test_a_model_that_torch_shares_out_is_refused_by_name(number):
    run_processes(1, given_to_initialize, number)
