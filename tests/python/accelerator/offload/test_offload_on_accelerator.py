# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""offload_optimizer on an accelerator: the host steps what the device trains, with a CPU engine's bits."""

import gc
import re

import models
import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, ON_GPU, assert_bytes_as_planned, begin, simulated_only, warm_up
from conftest import run_processes
from test_on_accelerator import check_order, far, on_host, run, unequal

import deeptide
from deeptide import utils

STEPS, WIDTH = 2, 1100  # a unit's shard is several blocks, the last one not whole, at a world of 1
TO_HOST = {"offload_optimizer": {"device": "cpu"}}
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lamb": {"lr": 1e-2},
}


class Model(torch.nn.Module):
    """One unit of 1.2 M elements, and small ones."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 24) for _ in range(2))

    def forward(self, x):
        x = torch.tanh(self.wide(x))
        return sum(layer(x) for layer in self.layers).float().square().mean()


def make_engine(device, stage, bf16=False, gas=1, zero=None, kind=Model, **extra):
    model = models.to_device(models.make_model(kind=kind), device)
    cfg = models.config(stage, gas=gas, bf16=bf16, zero=zero or {}, **extra)
    return deeptide.initialize(model=model, config=cfg)[0]


def batch(device, engine, seed):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    dtype = next(engine.module.parameters()).dtype
    return torch.randn(2, WIDTH, generator=generator).to(dtype).to(device)


def train(engine, device, gas=1, steps=STEPS, first=0):
    """Losses and norms, on the CPU."""
    results = []
    for step in range(first, first + steps):
        for micro in range(gas):
            loss = engine(batch(device, engine, step * gas + micro))
            engine.backward(loss)
            outcome = engine.step()
            results.append(loss.detach().cpu())
        assert outcome.applied
        results.append(torch.tensor(outcome.grad_norm))
    return results


def results_of(device, stage, gas=1, **settings):
    engine = make_engine(device, stage, gas=gas, **settings)
    results = train(engine, device, gas)
    results += on_host(models.everything(engine)).values()
    engine.destroy()
    return results


def place(folder):
    """In the host's memory, or in files."""
    return {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else TO_HOST


def compare_with_cpu(stages, gas, bf16, type, clipping, folder=None):
    """Page-locked memory is guarded: the host's access to a block that is still copied would end the process."""
    controls = begin()
    settings = {
        "gas": gas,
        "bf16": bf16,
        "gradient_clipping": clipping,
        "optimizer": {"type": type, "params": OPTIMIZERS[type]},
    }
    for stage in stages:
        expected = results_of("cpu", stage, **settings)
        for schedule in ("late_default", "late_others", "random"):
            controls.configure(schedule, max_delay_us=300, guard_pinned=True)
            got = results_of(DEVICE, stage, zero=place(folder), **settings)
            check_order(controls)
            if ON_GPU:
                assert far(expected, got, 2e-2 if bf16 else 1e-4) == [], (stage, schedule)
            else:
                assert unequal(expected, got) == [], (stage, schedule)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "bf16", "type", "clipping"),
    [
        (1, 1, False, "AdamW", 1.0),
        (1, 2, True, "SGD", 0.01),
        (2, 2, False, "Lamb", 0.01),
        (2, 1, True, "AdamW", 0.01),
        (2, 2, True, "Lamb", 1.0),
        (2, 1, False, "SGD", 0.0),
    ],
)
def test_the_host_steps_as_a_cpu_engine_does_bit_for_bit(world, gas, bf16, type, clipping):
    run(world, compare_with_cpu, [0, 1, 2, 3], gas, bf16, type, clipping)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "gas", "bf16", "type", "clipping"), [(1, 2, True, "AdamW", 0.01), (2, 1, False, "Lamb", 1.0)]
)
def test_the_host_steps_states_in_files_bit_for_bit(world, gas, bf16, type, clipping, tmp_path):
    run(world, compare_with_cpu, [0, 1, 2, 3], gas, bf16, type, clipping, str(tmp_path))


def pin_for_another():
    """Pins as where a GPU lies beside this device: copies make the host wait, and no number changes."""
    controls = begin()
    expected = results_of("cpu", 3)
    controls.configure("late_others", pins_for_another=True)
    got = results_of(DEVICE, 3, zero={**TO_HOST, "offload_param": {"device": "cpu"}})
    check_order(controls)
    assert unequal(expected, got) == []
    dist.destroy_process_group()


@simulated_only
def test_memory_that_is_pinned_for_another_device_is_named_and_changes_no_number():
    ranks = run_processes(2, pin_for_another, preload=("torch._dynamo",))
    assert ranks[0].stderr.count("page-locked memory is not for sim:0") == 1, ranks[0].stderr


def compare_rounded_masters(stage, moments, offload=TO_HOST):
    """Masters of 16 bits, on the host as on a CPU."""
    controls = begin()
    results = []
    for device, zero in (("cpu", {}), (DEVICE, offload)):
        controls.configure("random", guard_pinned=True)
        cfg = models.config(stage, gas=2, bf16=True, zero=zero, gradient_clipping=0.01)
        cfg["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": moments}
        model = models.to_device(models.make_model(kind=Model), device)
        engine = deeptide.initialize(model=model, config=cfg)[0]
        train(engine, device, gas=2, steps=1)
        with torch.no_grad():
            engine.module.layers[1].bias.add_(1)  # its master follows
        train(engine, device, gas=2, steps=1, first=1)
        results.append(on_host(models.everything(engine)))
        if device != "cpu":
            line = {line.role: line for line in engine.memory()}["optimizer states"]
            assert line.measured_bytes == line.predicted_bytes == 0
            assert line.measured_off_device_bytes == line.off_device_bytes
        engine.destroy()
    check_order(controls)
    if ON_GPU:
        assert far(results[0].values(), results[1].values(), 2e-2) == []
    else:
        models.assert_same(*results)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage", "moments"), [(1, 2, False), (2, 1, True), (2, 3, True), (2, 0, False)])
def test_the_host_steps_masters_of_16_bits(world, stage, moments):
    run(world, compare_rounded_masters, stage, moments)


def pass_on(order, stage, bf16, folder, guard_pinned=False):
    """A run goes on, bit for bit, from what it saved, in engines that place its tensors differently."""
    controls = begin()
    controls.configure("random", guard_pinned=guard_pinned)
    before = None
    for device, zero in order:
        engine = make_engine(device, stage, bf16=bf16, zero=zero)
        if before:
            engine.load_checkpoint(folder)
            models.assert_same(before, on_host(models.everything(engine)))
        train(engine, device, steps=1, first=5)
        engine.save_checkpoint(folder)
        before = on_host(models.everything(engine))
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


def cross_placements(stage, bf16, folder):
    nvme = place(folder + "/blocks")
    order = [
        ("cpu", {}),
        (DEVICE, TO_HOST),
        (DEVICE, {}),
        (DEVICE, nvme),
        (DEVICE, TO_HOST),
        ("cpu", {}),
        (DEVICE, nvme),
    ]
    pass_on(order, stage, bf16, folder)


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (3, False)])
def test_checkpoints_cross_placements(stage, bf16, tmp_path):
    run(2, cross_placements, stage, bf16, str(tmp_path))


def act_between_steps(stage, bf16):
    """Programs' acts on states and parameters have the same effect as with a CPU engine."""
    controls = begin()
    controls.configure("late", guard_pinned=True)
    results = []
    for device, zero in (("cpu", {}), (DEVICE, TO_HOST)):
        engine = make_engine(device, stage, bf16=bf16, zero=zero, deeptide={"drift_interval": 1})
        train(engine, device, steps=1)
        weight = engine.module.wide.weight
        engine._core.set_full_state("wide.weight", "master", torch.full(weight.shape, 0.01))
        train(engine, device, steps=1, first=1)
        first = engine.module.layers[0].weight
        utils.safe_set_full_optimizer_state(first, torch.full(first.shape, 0.02), "exp_avg")
        with torch.no_grad():
            engine.module.layers[1].bias.add_(1)  # its master follows
        train(engine, device, steps=1, first=2)
        engine.offload_states(device="cpu")
        engine.reload_states()
        train(engine, device, steps=1, first=3)
        engine.rebuild()
        train(engine, device, steps=1, first=4)
        results.append(on_host(models.everything(engine)))
        engine.destroy()
    check_order(controls)
    if ON_GPU:
        assert far(results[0].values(), results[1].values(), 2e-2 if bf16 else 1e-4) == []
    else:
        models.assert_same(*results)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "stage", "bf16"), [(2, 0, True), (2, 1, True), (1, 2, False), (2, 2, False), (2, 3, False), (1, 3, True)]
)
def test_programs_reach_states_on_the_host(world, stage, bf16):
    run(world, act_between_steps, stage, bf16)


def skip_and_rewind():
    """A skipped step moves nothing; a rewind returns to a copy on the host."""
    controls = begin()
    controls.configure("random", guard_pinned=True)
    own = {"on_skipped": "rewind", "skipped_limit": 1, "rewind_interval": 1}
    engine = make_engine(DEVICE, 2, bf16=True, zero=TO_HOST, deeptide=own)
    train(engine, DEVICE, steps=1)
    kept = on_host(models.everything(engine))
    line = {line.role: line for line in engine.memory()}["optimizer states"]
    assert line.measured_bytes == line.predicted_bytes == 0
    train(engine, DEVICE, steps=1, first=1)
    before = on_host(models.everything(engine))
    engine.backward(engine(batch(DEVICE, engine, 2) * float("nan")))
    outcome = engine.step()
    assert not outcome.applied and outcome.rewound_to == 1, outcome
    after = on_host(models.everything(engine))
    models.assert_same(kept, after)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    line = {line.role: line for line in engine.memory()}["optimizer states"]
    assert line.measured_bytes == 0
    assert line.measured_off_device_bytes == line.off_device_bytes
    engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


def test_a_rewind_returns_to_states_on_the_host():
    run(2, skip_and_rewind)


def compare_memory(stage, bf16, folder):
    """The device has less by the bytes of states and sums, as planned; the host's memory is forecast as well."""
    controls = begin()
    controls.configure("random", workspace=1 << 20)
    warm_up(make_engine(DEVICE, stage, bf16=bf16), train)
    peaks, kept, states = {}, {}, 0
    for name, zero in (("device", {}), ("host", TO_HOST), ("files", place(folder))):
        gc.collect()  # the last engine's optimizer refers to itself
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        held = torch.accelerator.memory_allocated()
        engine = make_engine(DEVICE, stage, bf16=bf16, zero=zero)
        train(engine, DEVICE)
        torch.accelerator.synchronize()
        peaks[name] = torch.accelerator.max_memory_allocated() - held
        kept[name] = torch.accelerator.memory_allocated() - held
        planned = assert_bytes_as_planned(
            engine, models.make_model(kind=Model), models.config(stage, bf16=bf16, zero=zero)
        )
        for line in engine.memory():
            if line.role in ("optimizer states", "gradients", "communication"):
                states += line.predicted_bytes if name == "device" else -line.predicted_bytes if name == "host" else 0
            if line.role in ("optimizer states", "gradients"):
                assert (line.off_device_bytes > 0) == (name != "device")
        assert (f"{'in the host, beside':<20}" in str(planned)) == (name != "device")
        engine.destroy()
        del engine
    assert states > 0
    for name in ("host", "files"):
        assert kept["device"] - kept[name] == pytest.approx(states, rel=0.02), (name, kept, states)
        # A step there has temporary tensors, too.
        assert peaks["device"] - peaks[name] >= 0.98 * states, (name, peaks, states)
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage", "bf16"), [(1, 2, True), (2, 1, False), (2, 3, True)])
def test_the_device_holds_no_states(world, stage, bf16, tmp_path):
    run(world, compare_memory, stage, bf16, str(tmp_path))


def count_copies():
    """Once a step: gradients in fp32 out, parameters in; a cap of the device's memory counts no state."""
    controls = begin()
    rate = 1e9
    numel = sum(p.numel() for p in Model().parameters())
    for bf16, item in ((False, 4), (True, 2)):
        engine = make_engine(DEVICE, 2, bf16=bf16, zero=TO_HOST, deeptide={"device_memory_cap": 6 * 4 * numel})
        for to_host, to_device, expected in ((rate, 0, 4 * numel), (0, rate, item * numel)):
            controls.configure("late", to_host=to_host, to_device=to_device)
            inputs = batch(DEVICE, engine, 0)
            torch.accelerator.synchronize()
            start = controls.host_time_s()
            engine.backward(engine(inputs))
            assert engine.step()
            torch.accelerator.synchronize()
            assert (controls.host_time_s() - start) * rate == pytest.approx(expected, rel=0.01)
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@simulated_only
def test_each_direction_copies_once():
    run(1, count_copies)


def seconds_of_step(controls, zero, compute, copies):
    """Simulated, of forward, backward and step, after others."""
    controls.configure("late", compute=compute, to_host=copies, to_device=copies)
    engine = make_engine(DEVICE, 2, bf16=True, zero=zero)
    inputs = batch(DEVICE, engine, 0)
    for _ in range(3):
        torch.accelerator.synchronize()
        start = controls.host_time_s()
        engine.backward(engine(inputs))
        assert engine.step()
        torch.accelerator.synchronize()
        seconds = controls.host_time_s() - start
    engine.destroy()
    return seconds


def compare_with_steps_on_the_device():
    """Compares where computation is long enough; the host's own work is in tests/simulated/host_exchange_test.cc."""
    controls = begin()
    compute = 1e8
    without, offloaded = (seconds_of_step(controls, zero, compute, compute) for zero in ({}, TO_HOST))
    print(f"without {without}, offloaded {offloaded}: {offloaded / without:.3f}")
    check_order(controls)
    assert offloaded <= 1.05 * without
    dist.destroy_process_group()


@simulated_only
def test_offloading_costs_no_more_than_a_twentieth_where_computation_is_long():
    run(1, compare_with_steps_on_the_device)


def refuse(config, error):
    begin()
    with pytest.raises(deeptide.ConfigError, match=re.escape(error)):
        deeptide.initialize(model=models.to_device(models.make_model(kind=Model), DEVICE), config=config)
    dist.destroy_process_group()


REFUSED = [
    (
        {"deeptide": {"packed_states": True}, "bf16": True},
        "does not go with deeptide.packed_states without offload_param yet",
    ),
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2}}, "stage": 0}, "whose ranks exchange signs"),
]


@pytest.mark.parametrize(("settings", "error"), REFUSED)
def test_what_the_host_cannot_step_is_named(settings, error):
    settings = dict(settings)
    zero = {**TO_HOST, **settings.pop("zero", {})}
    run(1, refuse, models.config(settings.pop("stage", 2), zero=zero, **settings), error)


def make_own(device, stage, bf16, zero):
    model = models.to_device(models.make_model(kind=Model), device)
    config = models.config(stage, bf16=bf16, zero=zero, gradient_clipping=0.01)
    del config["optimizer"]
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-5)
    return deeptide.initialize(model=model, config=config, optimizer=optimizer)[0]


def state_of_own(engine):
    roles = ("master", "exp_avg", "exp_avg_sq")
    names = [name for name, _ in engine.module.named_parameters()]
    state = {f"{name}/{role}": engine._core.full_state(name, role) for name in names for role in roles}
    return on_host({**state, **engine.module_state_dict()})


def step_by_an_own_optimizer(stage, bf16, folder, offload=TO_HOST):
    """An optimizer of the program's own steps tensors of the host, as on a CPU."""
    controls = begin()
    results = []
    for device, zero in (("cpu", {}), (DEVICE, offload)):
        controls.configure("random", guard_pinned=True)
        engine = make_own(device, stage, bf16, zero)
        train(engine, device)
        weight = engine.module.wide.weight
        engine._core.set_full_state("wide.weight", "exp_avg", torch.full(weight.shape, 0.01))
        train(engine, device, steps=1, first=STEPS)
        results.append(state_of_own(engine))
        if device != "cpu":
            line = {line.role: line for line in engine.memory()}["optimizer states"]
            assert line.measured_bytes == line.predicted_bytes == 0
            assert line.measured_off_device_bytes == line.off_device_bytes > 0
            engine.save_checkpoint(folder)
        engine.destroy()
    if ON_GPU:
        assert far(results[0].values(), results[1].values(), 2e-2 if bf16 else 1e-4) == []
    else:
        models.assert_same(*results)
    for device, zero in ((DEVICE, {}), (DEVICE, offload), ("cpu", {})):
        engine = make_own(device, stage, bf16, zero)
        engine.load_checkpoint(folder)
        models.assert_same(results[1], state_of_own(engine))
        engine.destroy()
    check_order(controls)
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize(("world", "stage", "bf16"), [(1, 2, True), (2, 0, True), (2, 1, False), (2, 3, False)])
def test_an_optimizer_of_the_programs_own_steps_on_the_host(world, stage, bf16, tmp_path):
    run(world, step_by_an_own_optimizer, stage, bf16, str(tmp_path))


def refuse_an_own_optimizer():
    begin()
    for zero in ({"offload_optimizer": {"device": "cpu", "ratio": ratio}} for ratio in (0.5, "auto")):
        with pytest.raises(
            deeptide.ConfigError, match=r"NAdam, your own, which steps states in one place yet; set its"
        ):
            make_own(DEVICE, 2, False, zero)
    dist.destroy_process_group()


def test_an_optimizer_of_the_programs_own_steps_no_share():
    run(1, refuse_an_own_optimizer)
