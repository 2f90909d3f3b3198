# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's own GPT with its `parallel_state` as mpu, beside the whole model on plain torch."""

import core_gpt
import pytest
import torch
import torch.distributed as dist
from conftest import run_processes

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


def reaches(sizes, folder):
    """Trains, saves in the middle, and ends; a new engine on other groups goes on from there."""
    from deeptide.as_deepspeed.initialize import init_distributed

    init_distributed("gloo")
    ends = []
    for number, (tensor, stage) in enumerate(sizes):
        engine, *data = start("llama", tensor, stage, core_gpt.whole_values("llama") if number == 0 else None)
        if number == 0:
            core_gpt.steps_of(engine, *data, 0, 2)
            engine.save_checkpoint(folder)
        else:
            assert engine.load_checkpoint(folder)[0] is not None
        found = core_gpt.steps_of(engine, 0, 1, 2, 4)  # all ranks train on equal batches
        state = {name: v for name, v in engine.module_state_dict().items() if v is not None}  # Megatron's extra states
        ends.append((found, state))
        engine.destroy()
    (expected, weights), (again, same), (resharded, near_to) = ends
    assert again == expected
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    near(resharded[0], expected[0], 1e-5, "losses")
    near(resharded[1], expected[1], 1e-4, "norms")
    assert {name: v.shape for name, v in near_to.items()} == {name: v.shape for name, v in weights.items()}
    for name, value in weights.items():
        near(near_to[name], value, 0, name, floor=2e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_the_same_bits_and_on_other_groups(stage, tmp_path):
    run_processes(2, reaches, [(2, stage), (2, stage), (1, 2)], str(tmp_path), preload=PRELOAD)


def drop():
    """Dropout of what ranks have alike draws alike, that of heads apart, and both anew in each forward."""
    from deeptide.as_deepspeed.initialize import init_distributed

    init_distributed("gloo")
    outputs = {}
    for name, more in {"hidden": {"hidden_dropout": 0.5}, "heads": {"attention_dropout": 0.5}}.items():
        engine, *_ = start("gpt", 2, 1, core_gpt.whole_values("gpt"), **more)
        losses = [core_gpt.loss_of(engine, *core_gpt.batch(0)) for _ in range(2)]
        assert losses[0] != losses[1]
        engine.backward(losses[0])  # the ranks compare their losses
        engine.step()
        outputs[name] = losses[1].item()
    whole = core_gpt.train_whole("gpt", 1, 1)[0][0]
    assert all(abs(value - whole) > 1e-4 for value in outputs.values())


def test_dropout_draws_by_the_tracker():
    run_processes(2, drop, preload=PRELOAD)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_train_on_two_data_ranks(stage):
    run_processes(4, train, "gpt", stage, 2, True, preload=PRELOAD)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequences"])
@pytest.mark.parametrize(
    ("kind", "stage"), [("gpt", 0), ("gpt", 3), ("llama", 1), ("llama", 2), ("qk-norms", 0), ("qk-norms", 3)]
)
def test_slices_train_as_the_whole_model(kind, stage, sequence_parallel):
    run_processes(2, train, kind, stage, 2, sequence_parallel, preload=PRELOAD)
