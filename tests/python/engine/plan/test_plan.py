# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deeptide.plan: the engine's own forecast before there is an engine, what fits a machine, and the command."""

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide
from deeptide import _C
from deeptide._commands import plan as plan_command
from deeptide._forecast.plan import choices

GIB = 2**30


class Wide(nn.Module):
    """Odd sizes, a norm that keeps fp32 and a frozen layer: units of several types and kinds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(37, 129)
        self.norm = nn.BatchNorm1d(129)
        self.frozen = nn.Linear(129, 129).requires_grad_(False)
        self.h = nn.ModuleList(nn.Linear(129, 129, bias=False) for _ in range(3))
        self.last = nn.Linear(129, 1)

    def forward(self, x):
        x = self.frozen(self.norm(self.first(x)))
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.last(x).float().square().mean()


class Large(nn.Module):
    """Blocks of several megabytes, so that files hold whole blocks and parts."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(1100, 1100) for _ in range(3))

    def forward(self, x):
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class Middle(models.TinyModel):
    """Blocks of 395 KB beside a tied embedding of 512 KB: units of two sizes."""

    def __init__(self):
        super().__init__(vocab=1000, width=128, layers=5)


def input_of(model):
    if isinstance(model, models.TinyModel):
        return models.batches(1, 2)[0]
    return (torch.randn(4, 37 if isinstance(model, Wide) else 1100),)


MUON = {"type": "Muon", "params": {"lr": 1e-3}}
ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
SGD = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}
KINDS = (models.TinyModel, Wide)
GRID = [
    (KINDS[i % 2], stage, world, bf16, gas, optimizer)
    for i, ((stage, world), (bf16, gas, optimizer)) in enumerate(
        itertools.product(
            [(0, 1), (0, 2), (1, 2), (2, 3), (3, 1), (3, 2), (3, 3)],
            [(False, 1, ADAM), (True, 2, SGD), (True, 1, MUON)],
        )
    )
] + [(models.TinyModel, 0, 2, True, 2, ONE_BIT)]


def forecast_and_truth(world, kind, config, steps=1):
    """By role: what is planned; what the engine forecasts; what it took."""
    model = models.make_model(kind=kind)
    planned = deeptide.plan(model, config, world_size=world.size)
    engine = deeptide.initialize(model=model, config=config, world=world)[0]
    batch = input_of(model)
    for _ in range(steps * config["gradient_accumulation_steps"]):
        inputs = [x.to(next(model.parameters()).dtype) if x.is_floating_point() else x for x in batch]
        engine.backward(engine(*inputs))
        engine.step()
    lines = {line.role: line for line in engine.memory()}
    engine.destroy()
    mine = {role: (line.memory_bytes, line.late_bytes) for role, line in planned.lines.items()}
    return mine, {role: (line.predicted_bytes, line.late_bytes) for role, line in lines.items()}, lines


def check(world, kind, config, steps=1, at_most=()):
    """Compares forecast and use; what is taken because a rank is late depends on the machine, the rest does not.

    at_most: roles of which less may be taken.
    """
    for planned, forecast, lines in run_ranks(world, forecast_and_truth, kind, config, steps):
        assert planned == forecast, config
        for role, line in lines.items():
            memory, late = planned[role]
            least = 0 if role in at_most else 0.98 * memory
            assert least <= line.measured_bytes <= 1.02 * memory, (role, planned, line.measured_bytes, config)
            assert line.measured_late_bytes <= late, (role, planned, line.measured_late_bytes, config)


@pytest.mark.both_ways
@pytest.mark.parametrize(("kind", "stage", "world", "bf16", "gas", "optimizer"), GRID)
def test_a_plan_is_what_the_engine_forecasts_and_takes(kind, stage, world, bf16, gas, optimizer):
    # An operator may use parts of the two largest units: there is room for both, though few units of these models'
    # many sizes are whole at once.
    config = models.config(stage, bf16=bf16, gas=gas, optimizer=optimizer, micro=2)
    check(world, kind, config, at_most=("gathered peak",))


@pytest.mark.parametrize(
    ("world", "bf16", "ratio", "max_in_cpu"),
    [(1, False, 1.0, 0), (2, True, 1.0, 0), (1, True, 0.3, 1_100_000), (2, False, 0.5, 10**9)],
)
def test_a_plan_knows_what_lies_in_files(world, bf16, ratio, max_in_cpu, tmp_path):
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {
        "offload_optimizer": {**files, "ratio": ratio},
        "offload_param": {**files, "max_in_cpu": max_in_cpu, "buffer_count": 2},
    }
    config = models.config(3, bf16=bf16, zero=zero)
    check(world, Large, config)
    lines = deeptide.plan(models.make_model(kind=Large), config, world_size=world).lines
    elements = 3 * (1100 * 1100 + 1100) / world
    states = elements * 4 * (3 if bf16 else 2)
    assert lines["optimizer states"].file_bytes == pytest.approx(ratio * states, abs=4 * 2**20)
    kept = min(elements, max_in_cpu)
    assert lines["parameters"].file_bytes == pytest.approx((elements - kept) * (2 if bf16 else 4), abs=4 * 2**20)


def test_options_that_keep_more_are_counted():
    for more in ({"keep_grad": True}, {"on_skipped": "rewind"}):
        config = models.config(2, bf16=True)
        config["deeptide"] = {**config.get("deeptide", {}), **more}
        check(2, models.TinyModel, config)


PACKED = {"deeptide": {"packed_states": True}}
SMALL = {"deeptide": {"packed_states": True, "moment_dtype": "bf16"}}
LIMITED = {"zero": {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}}
FILES = {"device": "nvme", "buffer_count": 4}
WHERE = {
    "states": {"zero": {"offload_optimizer": FILES}},
    "part of the states": {"zero": {"offload_optimizer": {**FILES, "ratio": 0.3}}},
    "gradients": {"deeptide": {"placement": {"gradients": {"nvme": "rest"}}}},
    "all": {
        "zero": {"offload_optimizer": FILES, "offload_param": FILES},
        "deeptide": {"placement": {"gradients": {"nvme": "50%", "cpu": "rest"}}},
    },
}
# Model, stage, world, bf16, micro-batches; what else the configuration has.
ROLES = [
    (Middle, 0, 1, True, 1, {}),
    (Middle, 0, 2, False, 1, {}),
    (Middle, 0, 3, True, 2, {}),
    (Middle, 1, 2, True, 3, {}),
    (Middle, 1, 3, False, 2, {"optimizer": ADAM}),
    (Middle, 2, 2, True, 1, SMALL),
    (Middle, 2, 3, True, 2, PACKED),
    (Middle, 3, 2, False, 1, {}),
    (Middle, 3, 2, True, 2, LIMITED),
    (Middle, 3, 3, True, 1, SMALL),
    (Middle, 2, 2, True, 1, {"optimizer": MUON}),
    (Middle, 2, 2, False, 2, {"sparse_gradients": True}),
    (Wide, 0, 2, True, 2, {"optimizer": SGD}),
    (Wide, 1, 2, False, 1, {}),
    (Wide, 2, 3, False, 2, {"optimizer": MUON}),
    (Wide, 3, 2, False, 2, {}),
    (Large, 0, 2, True, 1, {}),
    (Large, 1, 1, True, 2, WHERE["states"]),
    (Large, 1, 2, True, 1, WHERE["gradients"]),
    (Large, 2, 2, True, 2, WHERE["gradients"]),
    (Large, 2, 3, False, 1, WHERE["part of the states"]),
    (Large, 2, 2, True, 1, SMALL | {"zero": WHERE["states"]["zero"]}),
    (Large, 3, 2, False, 1, LIMITED),
    (Large, 3, 2, True, 2, WHERE["all"]),
    (Large, 3, 1, True, 1, WHERE["all"]),
]


def config_with_files(stage, bf16, gas, more, folder):
    more = json.loads(json.dumps(more))
    for section in more.get("zero", {}).values():
        if isinstance(section, dict):
            section["nvme_path"] = folder
    if placement := more.get("deeptide", {}).get("placement"):
        placement["nvme_path"] = folder
    return models.config(stage, bf16=bf16, gas=gas, **more)


@pytest.mark.both_ways
@pytest.mark.parametrize(("kind", "stage", "world", "bf16", "gas", "more"), ROLES)
def test_every_role_takes_what_was_forecast(kind, stage, world, bf16, gas, more, tmp_path):
    config = config_with_files(stage, bf16, gas, more, str(tmp_path))
    check(world, kind, config, steps=3)


def run_ahead(world, stage, ahead):
    """Rank 0 ends two backward passes while rank 1 is elsewhere: in neither forward, backward nor step."""
    model = models.make_model(kind=Middle)
    engine = deeptide.initialize(model=model, config=models.config(stage), world=world)[0]
    batch = input_of(model)
    if world.rank == 1:
        assert ahead.wait(60)
    for _ in range(2 if world.rank == 0 else 1):
        engine.backward(engine(*batch))
    ahead.set()
    assert engine.step()
    return {line.role: line for line in engine.memory()}


@pytest.mark.both_ways
@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_late_rank_adds_is_counted_apart(stage):
    first, _ = ranks = run_ranks(2, run_ahead, stage, threading.Event())
    for lines in ranks:
        for line in lines.values():
            assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02)
            assert 0 <= line.measured_late_bytes <= line.late_bytes, line
    assert first["communication"].measured_late_bytes > 0
    assert f"late {first['communication'].measured_late_bytes} B of at most" in repr(first["communication"])


class ZeroLinear(nn.Linear):
    """Draws nothing: recording a model draws its random numbers, which takes minutes at this size."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def test_nothing_is_made_of_a_model_that_is_not_there():
    with deeptide.zero.Init():
        model = nn.Sequential(*(ZeroLinear(8192, 8192) for _ in range(256)))  # 64 GiB in fp32
    config = models.config(3, bf16=True)
    del config["deeptide"]
    made = deeptide.plan(model, config, world_size=64, ranks_per_host=8)
    share = 256 * 8192 * 8193 / 64
    assert made.lines["parameters"].memory_bytes == pytest.approx(2 * share, rel=0.01)
    assert made.lines["optimizer states"].memory_bytes == pytest.approx(12 * share, rel=0.01)
    assert made.host_bytes == 8 * made.peak_bytes
    assert made.phases["training"] == made.peak_bytes > made.phases["first forward"]
    assert "64 ranks, 8 per host" in str(made)


def test_the_first_setting_that_fits_is_recommended(tmp_path):
    model = models.make_model(kind=Large)
    config = models.config(0, bf16=True)
    config["deeptide"] = {"shared_memory": False}

    def fitting(memory):
        found = choices(model, config, world_size=4, machine=_C.MachineLimits(memory, "a test"))
        return next((choice.sections["zero_optimization"] for choice in found if choice.fits), None)

    by_stage = [deeptide.plan(model, {**config, "zero_optimization": {"stage": s}}, 4).host_bytes for s in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert fitting(GIB) == {"stage": 0}
    assert fitting(by_stage[0] - 1) == {"stage": 1}
    assert fitting(by_stage[1] - 1) == {"stage": 2} or by_stage[1] == by_stage[2]
    assert fitting(1) is None


def test_files_are_recommended_as_far_as_the_disks_reach(tmp_path):
    model = models.make_model(kind=Large)
    config = models.config(0, bf16=True)
    config["deeptide"] = {"shared_memory": False}
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]

    def found(memory, *free, devices=(1, 2)):
        spaces = [_C.FolderSpace(*each) for each in zip(folders, free, devices, strict=True)]
        machine = _C.MachineLimits(memory, "the limit of a test", None, None, spaces)
        return {choice.name: choice for choice in choices(model, config, world_size=2, machine=machine)}

    plenty = found(GIB, GIB, GIB)
    states = plenty["stage 3, optimizer states in files"]
    everything = plenty["stage 3, all of them and gradients in files"]
    assert next(iter(plenty.values())).fits
    assert everything.fits
    assert "gradients" in everything.sections["deeptide"]["placement"]
    assert everything.sections["zero_optimization"]["offload_optimizer"]["nvme_path"] == folders
    files = states.plan.host_file_bytes
    assert found(GIB, files // 2, files // 2)[states.name].fits
    short = found(GIB, files // 2, files // 2 - 1)[states.name]
    assert re.fullmatch(r"files take [\d.]+ MiB of .*/b, which has [\d.]+ MiB free", short.why_not), short.why_not
    assert found(GIB, files, files, devices=(1, 1))[states.name].fits, "one disk has room for both folders"
    assert not found(GIB, files - 1, files - 1, devices=(1, 1))[states.name].fits
    low = found(states.plan.host_bytes - 1, GIB, GIB)
    assert "and the limit of a test leaves" in low[states.name].why_not
    assert not low["stage 0"].fits


def test_this_machines_limits_are_those_of_the_kernel(tmp_path):
    folders = [str(tmp_path), str(tmp_path / "not" / "there" / "yet")]
    machine = _C.machine_limits(folders)
    assert 0 < machine.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 2
    assert machine.bound == "available memory" or machine.bound.startswith("the limit of /sys/fs/cgroup")
    assert [each.folder for each in machine.folders] == folders
    assert {each.device for each in machine.folders} == {os.stat(tmp_path).st_dev}
    assert machine.folders[1].free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert not os.path.exists(folders[1])
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert machine.lockable_bytes == (None if locked == resource.RLIM_INFINITY else locked)
    assert (machine.shared_memory_bytes is not None) == os.path.exists("/dev/shm")


def command(*arguments):
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": package}
    words = ["deeptide", "plan", *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**models.config(2, bf16=True), "deeptide": {}}))
    return str(path)


@pytest.mark.costly
def test_the_command_plans_a_model_by_its_size(config_file, tmp_path):
    done = command("--config", config_file, "--params", "7B", "--num_ranks", "8")
    assert done.returncode == 0, done.stderr
    assert "a transformer of 32 layers, width 4" in done.stdout
    assert "ZeRO stage 2, 8 ranks" in done.stdout
    assert "this machine:" in done.stdout
    small = command("--config", config_file, "--params", "1M", "--layers", "2", "--vocab", "1000")
    assert 'recommended: "zero_optimization": {"stage": 0}' in small.stdout, small.stdout
    huge = command("--config", config_file, "--params", "900B", "--layers", "96", "--nvme_path", str(tmp_path))
    assert "nothing fits" in huge.stdout


@pytest.mark.costly
def test_the_command_plans_a_thousand_ranks(config_file):
    done = command(
        *("--config", config_file, "--params", "70B", "--layers", "80"),
        *("--num_ranks", "1024", "--ranks_per_host", "8", "--json"),
    )
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout.splitlines()[-1])["per_rank"]["optimizer states"]["memory"]
    assert states == pytest.approx(12 * 70e9 / 1024, rel=0.05), "a master and two moments of fp32, a slice of each"


@pytest.mark.costly
def test_the_command_plans_the_model_of_a_file(config_file, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(1000, 1000)\n")
    done = command("--config", config_file, "--model-file", f"{script}:make", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["per_rank"]["parameters"]["memory"] == pytest.approx(2 * 1_001_000, rel=0.01)
    assert made["host"] == max(made["phases"].values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-file", "none.py:make"], "expected FILE.py:FUNCTION"),
        (["--params", "many", "--layers", "2"], "expected a number such as 350M or 7B"),
        (["--params", "1M", "--layers", "2", "--num_ranks", "3", "--ranks_per_host", "2"], "a whole number of hosts"),
    ],
)
def test_the_command_answers_what_it_cannot_plan(config_file, arguments, words, capsys):
    try:
        status = plan_command.main(["--config", config_file, *arguments])
    except SystemExit as refusal:  # argparse's
        status = refusal.code
    assert status == 2
    assert words in capsys.readouterr().err
