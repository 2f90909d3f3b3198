# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_param on an accelerator: shards lie on the host and come to the device to be gathered, with the same bits."""

import gc
import re

import models
import pytest
import test_on_accelerator
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin, simulated_only, warm_up
from test_offload_on_accelerator import OPTIMIZERS, TO_HOST, Model, batch, make_engine, pass_on, results_of, train
from test_on_accelerator import check_order, far, on_host, run, unequal

import deeptide
from deeptide import utils

FEW = {"stage3_max_live_parameters": 0}  # the two largest units
ON_HOST = {**FEW, **TO_HOST, "offload_param": {"device": "cpu"}}


class Frozen(Model):
    def __init__(self):
        super().__init__()
        self.wide.weight.requires_grad_(False)


class Deep(torch.nn.Module):
    """Eight equal units, of which two are gathered at a time, and a smaller one."""

    def __init__(self, blocks=8):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(270, 270) for _ in range(blocks))
        self.last = torch.nn.Linear(270, 100)

    def forward(self, x):
        x = x[:, :270]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).float().square().mean()


def in_files(folder, **more):
    return {"device": "nvme", "nvme_path": folder, **more}


def placements(folder):
    few = in_files(folder, buffer_count=1, buffer_size=1000, max_in_cpu=1000)
    return {
        "host": ON_HOST,
        "host, small ones kept": {**ON_HOST, "stage3_param_persistence_threshold": 70_000},
        "files": {**FEW, **TO_HOST, "offload_param": in_files(folder)},
        "all in files": {**FEW, "offload_param": few, "offload_optimizer": in_files(folder)},
    }


def assert_equal(expected, got, bf16, where):
    if ON_GPU:
        assert far(expected, got, 2e-2 if bf16 else 1e-4) == [], where
    else:
        assert unequal(expected, got) == [], where


def compare_with_cpu(gas, bf16, type, clipping, frozen, folder):
    """Page-locked memory is guarded: the host's access to a shard that is still copied would end the process."""
    controls = begin()
    settings = {
        "gas": gas,
        "bf16": bf16,
        "gradient_clipping": clipping,
        "optimizer": {"type": type, "params": OPTIMIZERS[type]},
        "kind": Frozen if frozen else Model,
    }
    expected = results_of("cpu", 3, **settings)
    for name, zero in placements(folder).items():
        for schedule in ("late_default", "late_others", "random") if name == "host" else ("random",):
            controls.configure(schedule, max_delay_us=300, guard_pinned=True)
            got = results_of(DEVICE, 3, zero=zero, **settings)
            check_order(controls)
            assert_equal(expected, got, bf16, (name, schedule))
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "bf16", "type", "clipping", "frozen"),
    [
        (1, 1, False, "AdamW", 1.0, False),
        (1, 2, True, "SGD", 0.01, True),
        (2, 2, False, "Lamb", 0.01, False),
        (2, 2, True, "AdamW", 0.01, False),
        (2, 1, False, "AdamW", 0.0, True),
    ],
)
def test_shards_on_the_host_change_no_bit(world, gas, bf16, type, clipping, frozen, tmp_path):
    run(world, compare_with_cpu, gas, bf16, type, clipping, frozen, str(tmp_path))


def compare_many_units(bf16, folder):
    """Blocks with tied weights; how many are gathered at once, and how many ahead, changes nothing."""
    controls = begin()
    settings = (3, 2, 1.0, bf16)
    expected = test_on_accelerator.train("cpu", *settings)
    for name, zero in placements(folder).items():
        for more in ({}, {"stage3_prefetch_bucket_size": 0}, {"stage3_max_live_parameters": 10_000_000}):
            controls.configure("random", max_delay_us=300, guard_pinned=True)
            got = test_on_accelerator.train(DEVICE, *settings, zero={**zero, **more})
            check_order(controls)
            assert_equal(expected, got, bf16, (name, more))
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "bf16"), [(1, True), (2, False), (2, True)])
def test_blocks_with_ties_train_alike(world, bf16, tmp_path):
    run(world, compare_many_units, bf16, str(tmp_path))


def cross_placements(bf16, folder):
    places = placements(folder + "/blocks")
    order = [("cpu", {}), (DEVICE, places["host"]), (DEVICE, {}), (DEVICE, places["files"]), (DEVICE, TO_HOST)]
    order += [(DEVICE, places["all in files"]), ("cpu", {}), (DEVICE, places["host, small ones kept"])]
    pass_on(order, 3, bf16, folder, guard_pinned=True)


@pytest.mark.costly
@pytest.mark.parametrize(("world", "bf16"), [(1, False), (2, True)])
def test_checkpoints_cross_placements(world, bf16, tmp_path):
    run(world, cross_placements, bf16, str(tmp_path))


def write(engine, device, folder):
    """Writes parameters like programs between, and within, micro-batches."""
    train(engine, device, steps=1)
    wide, first, second = engine.module.wide.weight, engine.module.layers[0].weight, engine.module.layers[1].weight
    with torch.no_grad():
        wide.mul_(0.5)
        second.copy_(torch.arange(second.numel()).view(second.shape).to(second.dtype) / second.numel())
    with deeptide.zero.GatheredParameters([first, wide], modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            first.fill_(0.25)
            if dist.get_world_size() > 1:  # a CPU's single rank keeps it whole, where this is a write that nobody sees
                wide.data.mul_(2)
    copies = [wide.detach().clone(), engine.module.wide.bias.clone().detach()]
    train(engine, device, steps=1, first=1)
    loss = engine(batch(device, engine, 7))
    master = utils.safe_get_full_fp32_param(wide)
    engine.backward(loss)
    engine.step()
    utils.safe_set_full_fp32_param(wide, master)
    utils.safe_set_full_optimizer_state(first, torch.full(first.shape, 0.02), "exp_avg")
    train(engine, device, steps=1, first=2)
    engine.module.load_state_dict({name: value * 0.5 for name, value in engine.module_state_dict().items()})
    train(engine, device, steps=1, first=3)
    with torch.no_grad():  # evaluation has a plan of its own
        copies.append(engine(batch(device, engine, 0)).detach())
    engine.save_16bit_model(folder, "model.safetensors")
    return {**models.everything(engine), **{f"copy {i}": copy for i, copy in enumerate(copies)}}


def compare_programs(bf16, folder):
    controls = begin()
    gathered = {"stage3_gather_16bit_weights_on_model_save": True}
    results, exports = [], []
    for name, zero in {"cpu": {}, **placements(folder + "/blocks")}.items():
        device = "cpu" if name == "cpu" else DEVICE
        controls.configure("late", guard_pinned=True)
        engine = make_engine(device, 3, bf16=bf16, zero={**zero, **gathered})
        results.append(on_host(write(engine, device, f"{folder}/{name}")))
        engine.destroy()
        dist.barrier()
        with open(f"{folder}/{name}/model.safetensors", "rb") as file:
            exports.append(file.read())
        check_order(controls)
        if ON_GPU:
            assert far(results[0].values(), results[-1].values(), 2e-2 if bf16 else 1e-4) == [], name
        else:
            models.assert_same(results[0], results[-1])
            assert exports[0] == exports[-1], name
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "bf16"), [(1, True), (2, False), (2, True)])
def test_what_programs_write_reaches_the_host(world, bf16, tmp_path):
    run(world, compare_programs, bf16, str(tmp_path))


def rewind_and_rebuild():
    controls = begin()
    controls.configure("random", guard_pinned=True)
    own = {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 1}
    engine = make_engine(DEVICE, 3, bf16=True, zero=ON_HOST, deeptide=own)
    train(engine, DEVICE, steps=1)
    kept = on_host(models.everything(engine))
    train(engine, DEVICE, steps=1, first=1)
    engine.backward(engine(batch(DEVICE, engine, 2) * float("nan")))
    outcome = engine.step()
    assert not outcome.applied and outcome.rewound_to == 1, outcome
    models.assert_same(kept, on_host(models.everything(engine)))
    engine.rebuild()
    models.assert_same(kept, on_host(models.everything(engine)))
    train(engine, DEVICE, steps=1, first=3)
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_rewinds_and_is_rebuilt(world):
    run(world, rewind_and_rebuild)


def infer(folder):
    """Without an optimizer nothing is stepped, so nothing else has to lie on the host."""
    controls = begin()
    expected = None
    for name, zero in {"device": {}, **placements(folder)}.items():
        controls.configure("random", guard_pinned=True)
        zero = {key: value for key, value in zero.items() if key != "offload_optimizer"}
        cfg = models.config(3, zero=zero)
        del cfg["optimizer"]
        model = models.to_device(models.make_model(kind=Model), DEVICE)
        engine = deeptide.initialize(model=model, config=cfg)[0]
        with torch.no_grad():
            got = [engine(batch(DEVICE, engine, seed)).cpu() for seed in range(3)]
        expected = expected or got
        assert unequal(expected, got) == [], name
        engine.destroy()
        check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
def test_inference_needs_no_optimizer(tmp_path):
    run(2, infer, str(tmp_path))


def compare_memory(bf16, folder):
    """The device has less by the bytes of the shards, as planned; the host's memory is forecast as well."""
    controls = begin()
    controls.configure("random", workspace=1 << 20)
    warm_up(make_engine(DEVICE, 3, bf16=bf16, zero={**FEW, **TO_HOST}, kind=Deep), train)
    peaks, kept, forecasts = {}, {}, {}
    for name, zero in {"device": {**FEW, **TO_HOST}, **placements(folder)}.items():
        gc.collect()
        torch.accelerator.empty_cache()
        held = torch.accelerator.memory_allocated()
        engine = make_engine(DEVICE, 3, bf16=bf16, zero=zero, kind=Deep)
        torch.accelerator.reset_peak_memory_stats()  # the model as it was given, in fp32, takes more than training
        train(engine, DEVICE)
        torch.accelerator.synchronize()
        forecasts[name] = sum(line.predicted_bytes for line in engine.memory())
        peaks[name] = torch.accelerator.max_memory_allocated() - held
        kept[name] = torch.accelerator.memory_allocated() - held
        assert_bytes_as_planned(engine, models.make_model(kind=Deep), models.config(3, bf16=bf16, zero=zero), name)
        for line in engine.memory():
            if line.role == "parameters":
                assert (line.off_device_bytes > 0) == (name != "device"), (name, line)
                assert (line.predicted_bytes > 0) == (name in ("device", "host, small ones kept")), (name, line)
        where = "in files of" if "files" in name else "in the host's memory"
        assert (f"\n  parameters: {where}" in engine._core.summary()) == (name.startswith("host")), name
        assert ("% in files of" in engine._core.summary()) == ("files" in name), name
        engine.destroy()
        del engine
    shards = sum(p.numel() for p in Deep().parameters()) * (2 if bf16 else 4) // dist.get_world_size()
    for name in ("host", "files", "all in files"):
        fewer = forecasts["device"] - forecasts[name]
        # A single rank without offload gathers nothing.
        assert fewer >= (0.7 if dist.get_world_size() == 1 else 0.98) * shards, (name, forecasts, shards)
        assert kept["device"] - kept[name] >= 0.98 * fewer, (name, kept, forecasts)
        assert peaks["device"] - peaks[name] >= 0.98 * fewer, (name, peaks, forecasts)
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "bf16"), [(1, True), (2, False)])
def test_the_device_holds_no_shards(world, bf16, tmp_path):
    run(world, compare_memory, bf16, str(tmp_path))


def run_out_of_memory():
    begin()
    engine = make_engine(DEVICE, 3, zero={**FEW, **TO_HOST}, kind=Deep)  # of nine units two are gathered at a time
    forecast = sum(line.predicted_bytes for line in engine.memory())
    engine.destroy()
    del engine
    cap = {"device_memory_cap": int(0.9 * forecast)}
    engine = make_engine(DEVICE, 3, zero={**FEW, **TO_HOST}, kind=Deep, deeptide=cap)
    with pytest.raises(torch.OutOfMemoryError, match=re.escape('"offload_param": {"device": "cpu"}} frees')):
        train(engine, DEVICE)
    engine.destroy()
    dist.destroy_process_group()


def test_an_error_for_lack_of_memory_names_the_setting():
    run(1, run_out_of_memory)


LAYERS = 6


def seconds_of_step(controls, zero, compute, to_device, to_host):
    """Simulated, of forward, backward and step, after others."""
    controls.configure("late", compute=compute, to_device=to_device, to_host=to_host)
    model = models.to_device(models.make_model(layers=LAYERS, width=64, tied=False), DEVICE)
    limits = {"stage3_prefetch_bucket_size": 80_000, "stage3_max_live_parameters": 80_000}
    engine = deeptide.initialize(model=model, config=models.config(3, bf16=True, zero={**limits, **zero}))[0]
    inputs = [tensor.to(DEVICE) for tensor in models.batches(1, 2)[0]]
    for _ in range(3):
        torch.accelerator.synchronize()
        start = controls.host_time_s()
        engine.backward(engine(*inputs))
        assert engine.step()
        torch.accelerator.synchronize()
        seconds = controls.host_time_s() - start
    engine.destroy()
    check_order(controls)
    return seconds


def compare_with_shards_on_the_device(folder):
    """Compares where computation is long enough: a unit's shard comes while others compute.

    Also without offload of parameters the host steps, whose work takes no simulated time.
    """
    controls = begin()
    rate = 1e6
    offloads = {
        "host": {**TO_HOST, "offload_param": {"device": "cpu"}},
        "files": {**TO_HOST, "offload_param": in_files(folder)},
    }
    without = seconds_of_step(controls, TO_HOST, rate, rate / 2, rate)
    for name, zero in offloads.items():
        offloaded = seconds_of_step(controls, zero, rate, rate / 2, rate)
        copies = seconds_of_step(controls, zero, 0, rate / 2, 0)
        print(f"{name}: without {without}, offloaded {offloaded}: {offloaded / without:.3f}; copies alone {copies}")
        assert offloaded <= 1.05 * without, name
        assert copies > 0.08 * without, name  # they would show
    dist.destroy_process_group()


@pytest.mark.costly
@simulated_only
@pytest.mark.parametrize("world", [1, 2])
def test_offloading_costs_no_more_than_a_twentieth_where_computation_is_long(world, tmp_path):
    run(world, compare_with_shards_on_the_device, str(tmp_path))


def refuse(config, error):
    begin()
    with pytest.raises(deeptide.ConfigError, match=re.escape(error)):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


REFUSED = [
    (2, {**TO_HOST, "offload_param": {"device": "cpu"}}, {}, 'offload_param.device "cpu" needs stage 3'),
    (3, {**TO_HOST, "offload_param": {"device": "nvme"}}, {}, 'offload_param.device "nvme" needs nvme_path'),
    (
        3,
        {**TO_HOST, "offload_param": in_files("/tmp")},
        {"deeptide": {"on_skipped": "rewind"}},
        'does not go with deeptide.on_skipped "rewind"',
    ),
    (
        2,
        TO_HOST,
        {"deeptide": {"placement": {"parameters": {"device": "50%", "cpu": "rest"}}}},
        "deeptide.placement.parameters off the device needs stage 3",
    ),
    (
        3,
        TO_HOST,
        {
            "deeptide": {
                "placement": {"parameters": {"device": "50%", "nvme": "rest"}, "nvme_path": "/tmp"},
                "on_skipped": "rewind",
            }
        },
        'deeptide.placement.parameters in files does not go with deeptide.on_skipped "rewind"',
    ),
]


@simulated_only
@pytest.mark.parametrize(("stage", "zero", "more", "error"), REFUSED)
def test_what_is_refused_is_named(stage, zero, more, error):
    run(1, refuse, models.config(stage, zero=zero, **more), error)
