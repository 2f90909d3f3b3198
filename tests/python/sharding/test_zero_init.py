# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""zero.Init: models built without their memory hold the bits of ordinary construction, wherever they go from there."""

import copy
import json
import os
import signal
import threading
import time

import models
import pytest
import torch
from conftest import run_processes, run_ranks
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrizations

import deeptide
from deeptide import _C
from deeptide.zero import GatheredParameters, Init

WIDTH = 256  # a matrix of 256 x 256 in fp32 takes 256 KiB: deferred; its bias is not
BUILDING = threading.Lock()  # ranks as threads share torch's generator


class Everything(nn.Module):
    """Each way in which models fill their parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embed.weight
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[1].weight, std=0.02)
        nn.init.dirac_(self.layers[2].weight.data.view(WIDTH, WIDTH // 4, 4))
        nn.init.sparse_(self.layers[3].weight, 0.5)
        self.register_buffer("mask", torch.tril(torch.ones(512, 512)))
        self.register_buffer("steps", torch.arange(WIDTH), persistent=False)
        self.copied = copy.deepcopy(self.layers[1])
        self.scaled = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.02)
        self.stacked = nn.Parameter(torch.stack([torch.eye(WIDTH), torch.full((WIDTH, WIDTH), 2.0)]))
        with torch.no_grad():
            for row in range(WIDTH):
                self.scaled[row] += row
            self.scaled[3:7].normal_()
            self.scaled.t()[5:9].uniform_().mul_(self.stacked[0, 5:9])
            self.layers[2].weight.add_(self.layers[3].weight.t(), alpha=0.5)
            self.stacked.clamp_(max=self.scaled.norm().item())


def applied():
    def fill(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)).apply(fill)


def from_generator():
    generator = torch.Generator().manual_seed(7)
    model = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        model.weight.uniform_(generator=generator)
        generator.manual_seed(9)
        model.bias.normal_(generator=generator)
    return model


def of_another_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Linear(WIDTH, WIDTH)
    finally:
        torch.set_default_dtype(torch.float32)


BUILDS = {
    "everything": Everything,
    "apply": applied,
    "generator": from_generator,
    "default type": of_another_default_type,
    "transformer": lambda: nn.Transformer(WIDTH, 4, 2, 2, 512, batch_first=True),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, 2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.ConvTranspose2d(128, 64, 3)),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 4),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


def build(kind, deferred, seed=5):
    """The model, and what torch's generator gives next."""
    with BUILDING:
        torch.manual_seed(seed)
        with Init(enabled=deferred):
            model = kind()
        return model, torch.rand(4)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", BUILDS)
def test_values_are_those_of_ordinary_construction(name):
    plain, next_plain = build(BUILDS[name], False)
    model, next_drawn = build(BUILDS[name], True)
    assert torch.equal(next_plain, next_drawn), "the random stream goes on as if the model had been built"
    assert any(_C.is_deferred(p) for p in model.parameters())
    for key, value in model.state_dict().items():
        assert _C.is_deferred(value) == (value.is_floating_point() and value.nbytes >= 64 << 10), key
    for (key, value), (other_key, other) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other_key and value.shape == other.shape and value.dtype == other.dtype
        assert torch.equal(value, _C.values_of(other)), key
        _C.materialize(other)
        assert not _C.is_deferred(other) and torch.equal(value, other), key


def test_a_model_may_change_before_initialize():
    def change(model):
        model.bfloat16()
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[1].weight[3] = model[0].weight[5]
        model[1].weight.requires_grad_(False)
        return copy.deepcopy(model)

    plain, model = (change(build(applied, deferred)[0]) for deferred in (False, True))
    assert _C.is_deferred(model[0].weight) and model[0].weight.dtype == torch.bfloat16
    assert not model[1].weight.requires_grad
    for value, other in zip(plain.parameters(), model.parameters(), strict=True):
        with torch.no_grad():
            assert torch.equal(value, other)


def test_a_state_dict_is_loaded_without_copies():
    saved = {name: torch.randn_like(value) for name, value in applied().state_dict().items()}
    model, _ = build(applied, True)
    model.load_state_dict(saved)
    assert _C.is_deferred(model[0].weight)
    for name, value in model.state_dict().items():
        assert torch.equal(_C.values_of(value), saved[name])
    saved["0.weight"].zero_()
    with pytest.raises(ValueError, match=r"a tensor of shape \[256, 256\] that aten::copy_ read .* has changed since"):
        _C.values_of(model[0].weight)


def test_values_can_be_looked_at():
    plain, model = build(applied, False)[0], build(applied, True)[0]
    assert repr(plain[0].weight) == repr(model[0].weight)
    assert plain[0].weight[0].tolist() == model[0].weight[0].tolist()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
        assert model[0].weight.sum().item() == plain[0].weight.sum().item()
    assert _C.is_deferred(model[0].weight)


def test_data_ptr_tells_memories_apart():
    model, *_ = build(applied, True)
    tied = torch.nn.Linear(WIDTH, WIDTH)
    tied.weight = model[0].weight
    assert tied.weight.data_ptr() == model[0].weight.data_ptr() == model[0].weight.untyped_storage().data_ptr()
    assert model[0].weight[1:].data_ptr() == model[0].weight.data_ptr() + 4 * WIDTH
    large = [p for p in model.parameters() if _C.is_deferred(p)]
    assert len(large) > 1 and len({p.data_ptr() for p in large}) == len(large)
    made = large[0].detach().clone()
    _C.materialize(large[0])
    assert made.data_ptr() != large[0].data_ptr() == large[0].untyped_storage().data_ptr()


@pytest.mark.apart
def test_a_sharded_parameter_is_not_read_by_one_rank():
    build(applied, True)  # zero.Init has been used in this process

    def read(world):
        engine, *_ = deeptide.initialize(model=build(applied, True)[0], config=models.config(3), world=world)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was accessed directly while it is sharded"):
            engine.module[0].weight.tolist()
        assert engine.module[0].weight.new_tensor([1.0]).tolist() == [1.0]
        engine.destroy()

    run_ranks(2, read)


def test_what_would_go_wrong_is_an_error():
    model, _ = build(applied, True)
    with pytest.raises(RuntimeError, match=r"made under zero\.Init was accessed directly"):
        model[0].weight.detach().numpy()
    with pytest.raises(ValueError, match=r"aten::addmm was given a parameter that was built under zero\.Init"):
        model(torch.ones(1, WIDTH))


def test_an_operator_that_cannot_be_recorded_runs_at_once(capfd):
    model, _ = build(applied, True)
    plain, _ = build(applied, False)
    for one in (model, plain):
        with torch.no_grad():
            torch._foreach_mul_([one[0].weight, one[0].bias], 2.0)
    assert "zero.Init cannot record aten::_foreach_mul_" in capfd.readouterr().err
    assert not _C.is_deferred(model[0].weight) and torch.equal(model[0].weight, plain[0].weight)


def test_a_failing_constructor_leaves_the_scope():
    with pytest.raises(RuntimeError, match="reduction dim"), Init():
        torch.ones(WIDTH, WIDTH) @ torch.ones(3, 3)
    assert not _C.is_deferred(torch.ones(WIDTH, WIDTH))


def train(world, stage, deferred, bf16, seed_of_rank):
    model, _ = build(Everything, deferred, seed=5 + seed_of_rank * world.rank)
    config = models.config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-3}}, bf16=bf16)
    with Init(enabled=deferred):  # as programs do that build and initialize in one scope
        engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    assert not any(_C.is_deferred(t) for t in [*model.parameters(), *model.buffers()])
    start = engine.module_state_dict()
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + world.rank))
        x = x.to(model.scaled.dtype)
        for layer in model.layers:
            x = layer(x).tanh()
        x = (x @ model.scaled + model.copied(x) + x @ model.stacked[0]) @ model.head.weight.t()
        engine.backward(x.float().square().mean())
        engine.step()
    end = engine.module_state_dict()
    engine.destroy()
    return start, end


@pytest.mark.costly
@pytest.mark.both_ways
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_start_from_the_same_bits(stage, world, bf16):
    plain = run_ranks(world, train, stage, False, bf16, 0)
    # Rank 0's values count, whatever the others would have drawn.
    deferred = run_ranks(world, train, stage, True, bf16, 1)
    for (start, end), (own_start, own_end) in zip(plain, deferred, strict=True):
        for name, value in start.items():
            assert torch.equal(value, own_start[name]), name
        for name, value in end.items():
            assert torch.equal(value, own_end[name]), name


LAYERS = 48  # of 4 MiB


def peak_memory():
    """MiB since the last reset; ru_maxrss would be the parent's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))


def peaks_of_start(deferred):
    """Prints the MiB that building, and building and initializing, add to this process's peak; and a sum of values."""
    world = deeptide.init_distributed()
    torch.manual_seed(3)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = peak_memory()
    with Init(enabled=deferred):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    built = peak_memory()
    config = models.config(3, bf16=True)
    del config["optimizer"]
    engine, *_ = deeptide.initialize(model=model, config=config, world=world)
    started = peak_memory()
    total = sum(value.sum().item() for value in engine.module_state_dict().values())
    print(json.dumps([built - before, started - before, total]))
    engine.destroy()


@pytest.mark.apart
@pytest.mark.slow
def test_the_peak_is_a_shard_and_a_unit():
    def run(deferred):
        return [json.loads(process.stdout) for process in run_processes(2, peaks_of_start, deferred, fresh=True)]

    (plain_built, _, plain_sum), _ = run(False)
    assert plain_built >= 4 * LAYERS
    for built, started, total in run(True):
        assert built < 3 * 4 + 12, "one tensor, drawn; some MiB of torch's at first use"
        shard, unit = LAYERS * 2 // 2, 6 * 2
        assert started < shard + 3 * unit + 56, "56: what Gloo keeps of a broadcast, also without zero.Init"
        assert total == plain_sum


def write_in_turn(world, modifier):
    model, _ = build(applied, True, seed=world.rank)
    with GatheredParameters(list(model.parameters()), modifier_rank=modifier):
        if world.rank == modifier:
            nn.init.constant_(model[0].weight, 3.0)
            nn.init.trunc_normal_(model[1].weight)
    engine, *_ = deeptide.initialize(model=model, config=models.config(3), world=world)
    state = engine.module_state_dict()
    engine.destroy()
    return state


@pytest.mark.parametrize("modifier", [0])
def test_gathered_parameters_before_initialize(modifier):
    for state in run_ranks(2, write_in_turn, modifier):
        assert torch.equal(state["0.weight"], torch.full((WIDTH, WIDTH), 3.0))
        assert state["1.weight"].std() == pytest.approx(1, abs=0.2)


def test_a_scope_opens_while_another_thread_registers_parameters():
    registers, opened = threading.Event(), threading.Event()
    failures = []

    def wait_once(*_):
        if threading.current_thread() is builder and not registers.is_set():
            registers.set()
            opened.wait(timeout=10)

    def build():
        try:
            nn.Linear(2, 2)
        except RuntimeError as failure:
            failures.append(failure)

    # Twice: who is at the last hook would not notice that others came or went.
    hooks = [register_module_parameter_registration_hook(wait_once) for _ in range(2)]
    builder = threading.Thread(target=build)
    builder.start()
    registers.wait(timeout=10)
    with Init():
        opened.set()
        builder.join()
    for hook in hooks:
        hook.remove()
    assert failures == []


def fork_while_another_thread_builds():
    ended = threading.Event()

    def build():
        while not ended.is_set():
            with deeptide.zero.Init():
                nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(30):
        child = os.fork()
        if child == 0:  # as a loader's worker begins
            torch.manual_seed(1)
            nn.Linear(8, 8)
            os._exit(0)
        deadline = time.monotonic() + 60
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os._exit(1)
            time.sleep(0.001)
    ended.set()
    thread.join()


def test_a_child_forked_while_another_thread_builds_a_model_may_draw():
    run_processes(1, fork_while_another_thread_builds)
