# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""fp16 with loss scaling: trains as its fp32 masters, at every stage; overflows are named and change the scale."""

import models
import pytest
import torch
from conftest import run_ranks
from torch import nn

import deeptide

STAGES = [0, 1, 2, 3]
STEPS = 5
pytestmark = pytest.mark.both_ways


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def inputs(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step)).half()


def start(world=None, stage=0, gas=1, **fp16):
    settings = {"enabled": True, "initial_scale_power": 8, **fp16}
    model = models.make_model(kind=Net)
    engine, *_ = deeptide.initialize(model=model, config=models.config(stage, gas=gas, fp16=settings), world=world)
    return engine


def loss_of(engine, rank, step):
    return engine(inputs(rank, step)).float().square().mean()


def train(world, stage, gas=1, plain_backward=False, **fp16):
    engine = start(world, stage, gas, **fp16)
    norms = []
    for step in range(STEPS * gas):
        loss = loss_of(engine, world.rank, step)
        loss.backward() if plain_backward else engine.backward(loss)
        outcome = engine.step()
        if step % gas == gas - 1:
            assert outcome.applied
            norms.append(outcome.grad_norm)
    names = [name for name, _ in engine.module.named_parameters()]
    masters = {name: engine._core.full_state(name, "master") for name in names}
    engine.destroy()
    return masters, norms


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_stages_give_the_same_bits(world):
    first = None
    for stage in STAGES:
        for masters, norms in run_ranks(world, train, stage):
            first = first or (masters, norms)
            assert norms == first[1]
            assert all(torch.equal(masters[name], first[0][name]) for name in masters)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_scale_changes_neither_norms_nor_masters(stage):
    """Powers of two: only what underflows without a scale may differ."""
    for one, other in zip(
        run_ranks(2, train, stage, 1, False), run_ranks(2, lambda w: train(w, stage, loss_scale=2048.0)), strict=True
    ):
        assert one[1] == pytest.approx(other[1], rel=1e-3)
        for name in one[0]:
            torch.testing.assert_close(one[0][name], other[0][name], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_loss_backward_counts_as_much_as_engine_backward(stage):
    scaled, plain = run_ranks(2, train, stage), run_ranks(2, lambda world: train(world, stage, plain_backward=True))
    for one, other in zip(scaled, plain, strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-2)
        for name in one[0]:
            torch.testing.assert_close(one[0][name], other[0][name], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_trains_as_plain_torch_with_fp32_masters(stage):
    ranks = run_ranks(2, train, stage, 2)
    model = models.make_model(kind=Net)
    masters = [p.detach().clone().half().float() for p in model.parameters()]
    model.half()
    optimizer = torch.optim.AdamW(masters, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    scale = 256.0
    for step in range(STEPS):
        sums = [torch.zeros_like(m) for m in masters]
        for micro in range(2):
            for rank in range(2):
                loss = model(inputs(rank, 2 * step + micro)).float().square().mean()
                gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient.float()
        for master, total in zip(masters, sums, strict=True):
            master.grad = total / (4 * scale)
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        torch.testing.assert_close(ranks[0][0][name], master, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_of_one_rank_skips_all_and_halves_the_scale(stage, capfd):
    def program(world):
        engine = start(world, stage, hysteresis=1)
        names = [name for name, _ in engine.module.named_parameters()]
        engine.backward(loss_of(engine, world.rank, 0))
        assert engine.step().applied
        places = [(name, role) for name in names for role in ("master", "exp_avg", "exp_avg_sq")]
        before = [engine._core.full_state(*place) for place in places]
        loss = loss_of(engine, world.rank, 1)
        engine.backward(loss * (1e9 if world.rank == 1 else 1.0))
        outcome = engine.step()
        assert not outcome.applied
        assert outcome.rank == 1
        assert outcome.parameter.startswith("layers.")
        assert outcome.loss_scale == 256.0
        assert engine.cur_scale == engine.optimizer.loss_scale == 128.0
        assert engine.optimizer.overflow
        assert engine.skipped_steps == 1
        for place, value in zip(places, before, strict=True):
            assert torch.equal(value, engine._core.full_state(*place)), place
        engine.backward(loss_of(engine, world.rank, 2))
        assert engine.step().applied
        assert not engine.optimizer.overflow
        engine.destroy()

    run_ranks(2, program)
    assert "loss scale 256, now 128" in capfd.readouterr().err


def test_the_scale_grows_and_is_saved_and_restored(tmp_path):
    def program(world):
        engine = start(world, 2, loss_scale_window=2)
        scales = []
        for step in range(4):
            engine.backward(loss_of(engine, world.rank, step))
            engine.step()
            scales.append(engine.cur_scale)
        assert scales == [256.0, 256.0, 512.0, 512.0]
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        resumed = start(world, 2, loss_scale_window=2)
        resumed.load_checkpoint(tmp_path)
        assert resumed.cur_scale == 512.0
        resumed.backward(loss_of(resumed, world.rank, 4))
        resumed.step()
        assert resumed.cur_scale == 1024.0
        resumed.destroy()
        fixed = start(world, 2, loss_scale=64)
        fixed.load_checkpoint(tmp_path)
        assert fixed.cur_scale == 64.0
        assert not fixed.dynamic_loss_scale()
        fixed.destroy()

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_gradients_and_norms_are_without_the_scale(stage):
    def program(world, power):
        engine = start(world, stage, initial_scale_power=power)
        engine.backward(loss_of(engine, world.rank, 0))
        gradient = deeptide.utils.safe_get_full_grad(engine.module.layers[0].weight)
        norm = engine.step().grad_norm
        engine.destroy()
        return gradient, norm

    (small, small_norm), _ = run_ranks(2, program, 4)
    (large, large_norm), _ = run_ranks(2, program, 12)
    torch.testing.assert_close(small, large, rtol=2e-3, atol=1e-5)
    assert small_norm == pytest.approx(large_norm, rel=1e-3)


def test_auto_cast_takes_fp32_inputs():
    engine = start(auto_cast=True)
    assert engine(inputs(0, 0).float()).dtype == torch.float16
    engine.destroy()
    engine = start()
    with pytest.raises(RuntimeError):
        engine(inputs(0, 0).float())
    engine.destroy()


def test_the_summary_names_the_scale():
    engine = start()
    assert "loss scale: 256, doubled after 1000 good steps" in engine.summary()
    engine.destroy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_torch_autocast_computes_in_the_lower_type_and_keeps_fp32_parameters(stage, dtype):
    lower = getattr(torch, dtype)

    def program(world):
        model = models.make_model(kind=Net)
        config = models.config(stage, torch_autocast={"enabled": True, "dtype": dtype})
        engine, *_ = deeptide.initialize(model=model, config=config, world=world)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        norms = []
        for step in range(3):
            output = engine(inputs(world.rank, step).float())
            assert output.dtype == lower
            engine.backward(output.float().square().mean())
            norms.append(engine.step().grad_norm)
        assert engine.torch_autocast_dtype() == lower
        assert engine.cur_scale == (65536.0 if dtype == "float16" else 1.0)
        engine.destroy()
        return norms

    ranks = run_ranks(2, program)
    model = models.make_model(kind=Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for step in range(3):
        for rank in range(2):
            with torch.autocast("cpu", lower):
                output = model(inputs(rank, step).float())
            (output.float().square().mean() / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert ranks[0][step] == pytest.approx(norm.item(), rel=2e-2)
        assert ranks[0][step] == ranks[1][step]


def test_autocast_beside_fp16_is_refused():
    for others in (
        {"fp16": {"enabled": True}},
        {"bf16": True, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    ):
        config = models.config(0, **{"torch_autocast": {"enabled": True}, **others})
        with pytest.raises(deeptide.ConfigError, match="contradicts torch_autocast"):
            deeptide.initialize(model=models.make_model(kind=Net), config=config)


def test_autocast_in_bf16_goes_with_bf16_parameters():
    def losses_of(config):
        engine, *_ = deeptide.initialize(model=models.make_model(kind=Net), config=config)
        assert next(engine.module.parameters()).dtype == torch.bfloat16
        losses = []
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled="torch_autocast" not in config):
                loss = engine(inputs(0, step).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    own = losses_of(models.config(2, bf16=True))
    assert losses_of(models.config(2, bf16=True, torch_autocast={"enabled": True, "dtype": "bfloat16"})) == own


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_of_another_type_leaves_the_loss_scale(bf16, tmp_path):
    config = models.config(0, bf16=bf16)
    engine, *_ = deeptide.initialize(model=models.make_model(kind=Net), config=config)
    x = inputs(0, 0).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    scaled = start()
    scaled.load_checkpoint(tmp_path)
    assert scaled.cur_scale == 256.0
    scaled.backward(loss_of(scaled, 0, 1))
    assert scaled.step().loss_scale == 256.0
    scaled.save_checkpoint(tmp_path / "scaled")
    scaled.destroy()
    again = start(initial_scale_power=4)
    again.load_checkpoint(tmp_path / "scaled")
    assert again.cur_scale == 256.0  # of a run that has scaled
