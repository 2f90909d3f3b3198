# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""An engine without room says which settings free how much: those that it has not got, and that its optimizer takes."""

import re

import models
import pytest
import torch
from conftest import run_ranks

import deeptide

MIB = 1 << 20
WIDTH = 1536
BLOCKS = 4
NUMEL = BLOCKS * (WIDTH * WIDTH + WIDTH)


def advice(world, config):
    """{setting: MiB that it frees}, of an engine that has no room for its first bucket."""
    model = models.make_model(kind=models.Wide, width=WIDTH, layers=BLOCKS)
    kept = sum(line.memory_bytes for line in deeptide.plan(model, config, world_size=world.size).lines.values())
    config["deeptide"]["device_memory_cap"] = kept - 1
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    try:
        with pytest.raises(RuntimeError, match="device_memory_cap") as error:
            for _ in range(config["gradient_accumulation_steps"]):
                engine.backward(engine(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)))
                engine.step()
    finally:
        engine.destroy()
    found = re.findall(r"(?:^|; |memory )([^;]+?) frees ([\d.]+) (\w+) of", str(error.value).split("rank's memory ")[1])
    units = {"bytes": 1 / MIB, "KiB": 1 / 1024, "MiB": 1}
    return {setting: float(number) * units[unit] for setting, number, unit in found}


def one_rank(gas=2, **extra):
    return run_ranks(1, advice, models.config(2, gas=gas, **extra))[0]


def test_bits_of_states_and_files_are_named_with_what_they_free():
    freed = one_rank(bf16=True)
    states = 12 * NUMEL / MIB
    assert freed['"deeptide": {"packed_states": true}'] == pytest.approx(2 * NUMEL / MIB, rel=0.01)
    assert freed['"deeptide": {"moment_dtype": "bf16"}'] == pytest.approx(4 * NUMEL / MIB, rel=0.01)
    assert freed['engine.offload_states(device="nvme") between phases'] == pytest.approx(states, rel=0.01)
    assert freed['"zero_optimization": {"offload_optimizer": {"device": "nvme"}}'] == pytest.approx(states, rel=0.01)


def test_what_is_set_is_not_advised_again():
    freed = one_rank(bf16=True, deeptide={"packed_states": True, "moment_dtype": "bf16"})
    assert not any("packed_states" in setting or "moment_dtype" in setting for setting in freed), freed
    assert any("offload_states" in setting for setting in freed), freed


def test_what_the_optimizer_does_not_take_is_not_advised():
    freed = one_rank(bf16=True, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})
    assert not any("moment_dtype" in setting for setting in freed), freed
    assert any("packed_states" in setting for setting in freed), freed
    plain = one_rank()
    assert not any("packed_states" in setting for setting in plain), "a master of fp32 is the parameter"
    assert any("moment_dtype" in setting for setting in plain), plain


@pytest.mark.apart
def test_gradients_and_parameters_can_lie_in_files():
    freed = run_ranks(1, advice, models.config(3, gas=2))[0]
    sums = 4 * NUMEL / MIB - 6 * 4  # through six blocks
    assert freed['"deeptide": {"placement": {"gradients": {"nvme": "rest"}}}'] == pytest.approx(sums, rel=0.02)
    assert freed['"zero_optimization": {"offload_param": {"device": "nvme"}}'] > 0
