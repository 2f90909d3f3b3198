# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's own GPT with its `parallel_state` as mpu, beside the whole model on plain torch."""

import core_gpt
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes
from core_gpt import KINDS

pytest.importorskip("megatron.core", reason="megatron-core is not installed: tests/peers/run.sh does it")

PRELOAD = ("deeptide.as_deepspeed.initialize", "deeptide.tensor.axis", "megatron.core.models.gpt")


def near(found, expected, tolerance, what, floor=0.0):
    """Sums over ranks are taken in parts: losses and norms differ by some units of fp32."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=floor, msg=lambda text: f"{what}: {text}")


def start(kind, tensor, stage, values, **more):
    """An engine of Megatron's model, with this rank's slices of the values; (engine, its data rank, data ranks)."""
    import deeptide

    mpu = core_gpt.groups(tensor)
    model = core_gpt.make(kind, tensor, **more)
    if values is not None:
        core_gpt.fill(model, values, mpu.get_tensor_model_parallel_rank(), tensor)
    engine = deeptide.initialize(model=model, mpu=mpu, config=core_gpt.settings(stage))[0]
    return engine, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def train(kind, stage, tensor, sequence_parallel):
    from deeptide.as_deepspeed.initialize import init_distributed

    init_distributed("gloo")
    data_size = dist.get_world_size() // tensor
    losses, norms, weights = core_gpt.train_whole(kind, data_size)
    values = core_gpt.whole_values(kind)
    engine, *data = start(kind, tensor, stage, values, sequence_parallel=sequence_parallel)
    assert engine.mesh == {"pipe": 1, "data": data_size, "tensor": tensor}
    found = core_gpt.steps_of(engine, *data)
    near(found[0], losses, 1e-5, "losses")
    near(found[1], norms, 1e-4, "norms")
    state = engine.module_state_dict()
    for name, value in weights.items():
        near(state[name], value, 0, name, floor=2e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequences"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_train_as_the_whole_model(kind, stage, sequence_parallel):
    run_processes(2, train, kind, stage, 2, sequence_parallel, preload=PRELOAD)
