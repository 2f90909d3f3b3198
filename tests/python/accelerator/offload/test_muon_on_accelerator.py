# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Muon under offload_optimizer: the host moves momentum and masters, the device makes the products of matrices."""

import re

import models
import pytest
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, begin
from test_offload_on_accelerator import Model, make_engine, place, results_of, train
from test_offload_param_on_accelerator import FEW, in_files
from test_on_accelerator import check_order, far, on_host, run, unequal
from test_twin_flow_on_accelerator import split

import deeptide

pytestmark = pytest.mark.slow

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def placements(stage, folder):
    host = {"host": place(None), "files": place(folder)}
    if stage < 3:
        return host
    off = {"offload_param": {"device": "cpu"}}
    return {
        **host,
        "parameters too": {**FEW, **place(None), **off},
        "all in files": {**FEW, **place(folder), "offload_param": in_files(folder)},
    }


def compare_with_cpu(stage, bf16, folder):
    controls = begin()
    settings = {"gas": 2, "bf16": bf16, "gradient_clipping": 0.01, **MUON}
    expected = results_of("cpu", stage, **settings)
    for name, zero in placements(stage, folder).items():
        for schedule in ("late_default", "late_others", "random") if name == "host" else ("random",):
            controls.configure(schedule, max_delay_us=300, guard_pinned=True)
            got = results_of(DEVICE, stage, zero=zero, **settings)
            check_order(controls)
            if ON_GPU:
                assert far(expected, got, 2e-2) == [], (name, schedule)
            else:
                assert unequal(expected, got) == [], (name, schedule)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16"),
    [(1, 1, False), (1, 3, True), (2, 0, True), (2, 1, False), (2, 2, True), (2, 3, False), (2, 3, True)],
)
def test_the_host_steps_matrices_as_a_cpu_engine_does(world, stage, bf16, tmp_path):
    run(world, compare_with_cpu, stage, bf16, str(tmp_path))


def compare_on_the_device(bf16, folder):
    """Matrices that the device steps, beside shards on the host."""
    controls = begin()
    settings = {"gas": 2, "bf16": bf16, "gradient_clipping": 0.01, **MUON}
    controls.configure("random")
    expected = results_of(DEVICE, 3, zero=FEW, **settings)
    for off in ({"device": "cpu"}, in_files(folder)):
        controls.configure("random", max_delay_us=300, guard_pinned=True)
        got = results_of(DEVICE, 3, zero={**FEW, "offload_param": off}, **settings)
        check_order(controls)
        assert unequal(expected, got) == [] or ON_GPU, off
    dist.destroy_process_group()


@pytest.mark.parametrize("bf16", [False, True])
def test_the_device_steps_matrices_beside_shards_on_the_host(bf16, tmp_path):
    run(2, compare_on_the_device, bf16, str(tmp_path))


def account(stage, bf16, folder):
    """Every byte is forecast and planned; a checkpoint goes to a CPU engine and back."""
    controls = begin()
    before = None
    for device, zero in (*((DEVICE, zero) for zero in placements(stage, folder + "/blocks").values()), ("cpu", {})):
        controls.configure("random", guard_pinned=True)
        engine = make_engine(device, stage, bf16=bf16, zero=zero, **MUON)
        if before:
            engine.load_checkpoint(folder)
            models.assert_same(before, on_host(models.everything(engine)))
        train(engine, device, steps=1)
        engine.save_checkpoint(folder)
        before = on_host(models.everything(engine))
        lines = engine.memory() if device == DEVICE else []
        planned = deeptide.plan(
            models.to_device(models.make_model(kind=Model), device),
            models.config(stage, bf16=bf16, zero=zero, **MUON),
            world_size=dist.get_world_size(),
        )
        for line in lines:
            if line.role == "gathered peak":  # a load gathers more than training does
                continue
            assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02), line
            assert line.measured_off_device_bytes == line.off_device_bytes, line
            assert planned.lines[line.role].memory_bytes == line.predicted_bytes, line
            assert planned.lines[line.role].off_device_bytes == line.off_device_bytes, line
            if line.role == "optimizer states":
                assert line.predicted_bytes == 0 < line.off_device_bytes, line
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "stage", "bf16"), [(1, 2, True), (2, 0, False), (2, 3, True)])
def test_every_byte_is_forecast(world, stage, bf16, tmp_path):
    run(world, account, stage, bf16, str(tmp_path))


def refuse(ratio):
    begin()
    config = models.config(2, zero=split(ratio), **MUON)
    error = re.escape("does not go with the optimizer Muon, which takes whole matrices, in two places yet; set its")
    with pytest.raises(deeptide.ConfigError, match=error):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


@pytest.mark.parametrize("ratio", [0.5, "auto"])
def test_a_share_of_the_matrices_is_refused(ratio):
    run(1, refuse, ratio)
