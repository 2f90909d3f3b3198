# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that goes on with a run that DeepSpeed began, beside what DeepSpeed's own next steps gave."""

from pathlib import Path

import moved_runs
import torch
from moved_runs import BATCH, CLIENT_STATE, FURTHER, STEPS
from moved_runs import CASES as RUNS
from moved_settings import SETTINGS

import deeptide

CASES = {**RUNS, **SETTINGS}
_DEEPSPEEDS = ("data_types", "zero_allow_untested_optimizer")  # keys of the run that say nothing of this one


def precision_of(name):
    config = CASES[name]["config"]
    return next((kind for kind in ("bf16", "fp16") if kind in config), "fp32")


def start(world, name, stage, **more):
    case = CASES[name]
    config = {key: value for key, value in case["config"].items() if key not in _DEEPSPEEDS}
    config = {**config, **more, "zero_optimization": {"stage": stage}}
    for kind in ("bf16", "fp16"):
        if kind in config:
            config[kind] = {key: value for key, value in config[kind].items() if "master" not in key}
    config["train_micro_batch_size_per_gpu"] = BATCH if case["same"] else 2 * BATCH // world.size
    torch.manual_seed(1 + world.rank)
    model = moved_runs.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad or not case.get("save"):
                parameter.add_(1.0)  # nothing of it may stay
    model.gain.zero_()
    parameters, own = moved_runs.parameters_of(model, case["groups"]), {}
    if "own" in case:
        kind, keywords = case["own"]
        own = {"optimizer": getattr(torch.optim, kind)(parameters, **keywords)}
    engine, *_ = deeptide.initialize(model=model, model_parameters=parameters, config=config, world=world, **own)
    return engine


def step(engine, name, number):
    """Both ranks' batches of the first run, in any world."""
    if CASES[name]["same"]:
        tokens, targets = moved_runs.batch_of(number, 0)
    else:
        parts = [moved_runs.batch_of(number, part) for part in range(2)]
        tokens, targets = (torch.cat(sides).chunk(engine.world.size)[engine.world.rank] for sides in zip(*parts))
    loss = moved_runs.loss_of(engine, tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def states_of(engine, expected):
    """By torch's names of states: the engine's SGD has a "momentum" that is torch's "momentum_buffer"."""
    found = {}
    for key in expected:
        name, _, role = key.rpartition("/")
        found[key] = engine._core.full_state(name, "momentum" if role == "momentum_buffer" else role)
    return found


def go_on(world, folder, name, stage, tag, tolerance, universal=False):
    """This rank's further losses. `tolerance`: of every master and state after them; what is loaded is equal."""
    expected = torch.load(Path(folder, name, "expected.pt"))
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = start(world, name, stage, **more)
    strict = not CASES[name].get("save")  # frozen parameters may be left out
    path, client_state = engine.load_checkpoint(str(Path(folder, name)), tag=tag, load_module_strict=strict)
    assert path is not None
    assert client_state == CLIENT_STATE
    assert engine.global_steps == STEPS
    assert engine.global_samples == STEPS * 2 * BATCH
    assert engine.skipped_steps == 0
    scaled = precision_of(name) == "fp16"
    assert engine._core.loss_scale() == (2.0**9 if scaled else 1.0)
    for key, value in states_of(engine, expected["middle"]).items():
        theirs = expected["middle"][key]
        assert torch.equal(value.to(theirs.dtype).float(), theirs.float()), key
    assert torch.equal(engine.module.gain, torch.tensor([0.75, 1.25, 1.0], dtype=engine.module.gain.dtype))
    torch.testing.assert_close(
        engine.module.shift.detach().float(), torch.linspace(-0.5, 0.5, moved_runs.WIDTH), rtol=0, atol=2e-3
    )
    if name == "stage0-fp16":  # its own steps differ there from those of its stage 1: its states are 1/20 of them
        return [step(engine, name, STEPS)]
    losses = [step(engine, name, number) for number in range(STEPS, STEPS + FURTHER)]
    assert engine.global_steps == STEPS + FURTHER
    assert engine._core.loss_scale() == (2.0**11 if scaled else 1.0)
    furthest = {"": 0.0}
    for key, value in states_of(engine, expected.get("end", {})).items():
        theirs = expected["end"][key].float()
        furthest[key] = ((value - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)).item()
    key = max(furthest, key=furthest.get)
    assert furthest[key] <= tolerance, f"{key} is {furthest[key]} from DeepSpeed's"
    return losses


def check_losses(of_ranks, folder, name, tolerance, first):
    """Compares the means over ranks with DeepSpeed's. `first`: the tolerance of the loss on what was loaded."""
    theirs = torch.load(Path(folder, name, "expected.pt"))["losses"][STEPS:]
    ours = torch.tensor(of_ranks, dtype=torch.float64).mean(0)
    theirs = torch.tensor(theirs, dtype=torch.float64)[: len(ours)]
    torch.testing.assert_close(ours[0], theirs[0], rtol=first, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)
