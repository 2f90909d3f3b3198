# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that go on with what DeepSpeed's pipelines and tensor-parallel ranks began."""

from pathlib import Path

import torch
from parallel_runs import (
    ACCUMULATION,
    BATCH,
    CASES,
    FURTHER,
    STEPS,
    Scaled,
    batches,
    layers_of,
    loss_of,
    make_llama,
)

import deeptide
from deeptide import pipeline


def check_states(engine, expected):
    """Every master and state that this rank's stage has is equal; returns how many."""
    names = {name for name, _ in engine.module.named_parameters()}
    count = 0
    for key, value in expected.items():
        name, _, role = key.rpartition("/")
        if name in names:
            assert torch.equal(engine._core.full_state(name, role), value.float()), key
            count += 1
    return count


def go_on_in_pipeline(world, folder, name, stages, tolerance, tag="middle"):
    """`tolerance`: of each further loss; the first one follows from what was loaded."""
    case, expected = CASES[name], torch.load(Path(folder, name, "expected.pt"))
    torch.set_num_threads(1)
    torch.manual_seed(100 + world.rank)
    model = pipeline.PipelineModule(
        layers_of(case["tied"], pipeline), num_stages=stages, loss_fn=loss_of, partition_method="uniform", world=world
    )
    for module in model.modules():
        if isinstance(module, Scaled):
            module.gain.zero_()
    engine, *_ = deeptide.initialize(model=model, config=case["config"], world=world)
    path, client_state = engine.load_checkpoint(str(Path(folder, name)), tag=tag)
    assert path is not None
    assert client_state == {"epoch": 3}
    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * BATCH * ACCUMULATION)
    assert check_states(engine, expected["middle"]) > 0
    gains = [module.gain.tolist() for module in model.modules() if isinstance(module, Scaled)]
    assert gains == [[0.75]] * len(gains)
    data = batches(STEPS * ACCUMULATION)
    losses = [float(engine.train_batch(data)) for _ in range(FURTHER)]
    first = 1e-6 if "fp32" in name else tolerance
    torch.testing.assert_close(losses[0], expected["losses"][0], rtol=first, atol=0)
    torch.testing.assert_close(losses, expected["losses"], rtol=tolerance, atol=0)


def load_tensors(world, folder, name, stage, tag="middle"):
    """Whole tensors of what two tensor-parallel ranks had, in data-parallel ranks."""
    expected = torch.load(Path(folder, name, "expected.pt"))["middle"]
    config = {key: value for key, value in CASES[name]["config"].items() if key != "tensor_parallel"}
    model = make_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    config["zero_optimization"] = {"stage": stage}
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    _, client_state = engine.load_checkpoint(str(Path(folder, name)), tag=tag)
    assert client_state == {"epoch": 3}
    assert engine.global_steps == STEPS
    assert check_states(engine, expected) == len(expected) == 3 * len(list(model.parameters()))
