# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Names of DeepSpeed's that scripts use and that need nothing of the engine: tiles, scalers, sizes of batches."""

import json

import models
import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface, start, train
from torch.nn import functional

import deeptide


class TiledModel(torch.nn.Module):
    """An embedding, an MLP and a head; tiled over features and over the sequence, or not."""

    def __init__(self, tiles):
        super().__init__()
        torch.manual_seed(0)
        self.tiles = tiles
        self.embed = torch.nn.Embedding(17, 12)
        self.up = torch.nn.Linear(12, 20)
        self.down = torch.nn.Linear(20, 12)
        self.head = torch.nn.Linear(12, 17)

    def mlp(self, x):
        return self.down(self.up(x).relu())

    def loss(self, x, y):
        return functional.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="sum")

    def forward(self, x, y):
        x = self.embed(x)
        if not self.tiles:
            return self.loss(self.mlp(x), y) / y.numel()
        from deepspeed.runtime.sequence_parallel import ulysses_sp

        x = ulysses_sp.TiledMLP.apply(TiledModel.mlp, self, x, 3, [self.up.weight])
        loss = ulysses_sp.TiledFusedLogitsLoss.apply(TiledModel.loss, self, x, y, None, 4, [self.head.weight], "sum")
        return loss / y.numel()


def check_tiles():
    deepspeed = interface()
    torch.set_num_threads(1)
    tokens = torch.arange(4 * 7).reshape(4, 7) * 5 % 17
    losses = {}
    for tiles in (False, True):
        engine, *_ = deepspeed.initialize(model=TiledModel(tiles), config=models.config(3))
        rows = slice(2 * engine.global_rank, 2 * engine.global_rank + 2)
        losses[tiles] = []
        for _ in range(4):
            loss = engine(tokens[rows], tokens[rows] + 1 & 15)
            engine.backward(loss)
            engine.step()
            losses[tiles].append(loss.item())
        engine.destroy()
    assert losses[True][-1] < losses[True][0] - 0.1
    # The sums over shards round in another order.
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_layers_tiled_over_the_sequence_train_as_whole_ones_at_stage_3():
    run_processes(2, check_tiles)


def check_tiled_linear():
    deepspeed = interface()
    whole = torch.nn.Linear(23, 29)
    given = torch.randn(5, 23, requires_grad=True)
    tiled = deepspeed.zero.TiledLinear(23, 29, in_splits=3, out_splits=4, init_linear=whole)
    tiled(given).square().sum().backward()
    of_tiles, given.grad = given.grad, None
    whole(given).square().sum().backward()
    torch.testing.assert_close(of_tiles, given.grad)
    for row, top in zip(tiled.linears, tiled.out_parts):
        for tile, left in zip(row, tiled.in_parts):
            rows, columns = tile.weight.shape
            torch.testing.assert_close(tile.weight.grad, whole.weight.grad[top : top + rows, left : left + columns])
    assert len(deepspeed.zero.TiledLinear(8, 8, out_splits=2, combine_out_splits=False)(torch.ones(1, 8))) == 2
    with pytest.raises(RuntimeError, match=r"in_splits=9, expected 1 to in_features=8"):
        deepspeed.zero.TiledLinear(8, 8, in_splits=9)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    x = torch.randn(2, 7, 3)
    for reduction in ("mean", "sum", None):
        out = sequence_tiled_compute(torch.sin, 7, 3, {"input": x}, {}, "input", None, 1, reduction)
        if reduction is None:
            assert torch.equal(out, x.sin())
        else:
            torch.testing.assert_close(out, getattr(x.sin(), reduction)())
    with pytest.raises(ValueError, match='output_reduction is \'max\', expected "mean" or "sum"'):
        sequence_tiled_compute(torch.sin, 7, 3, {"input": x}, {}, "input", None, 1, "max")


def test_tiled_linear_is_a_linear_layer():
    run_processes(1, check_tiled_linear)


def steps_of(engine, accumulation, count, plain=False):
    """The parameters after `count` steps, each of `accumulation` micro-batches."""
    for step in range(count):
        for micro in range(accumulation):
            tokens, targets = models.batches(8, 8)[2 * step + micro]
            rows = slice(2 * engine.global_rank, 2 * engine.global_rank + 2)
            loss = engine(tokens[rows], targets[rows])
            loss.backward() if plain else engine.backward(loss)
            applied = engine.step().applied
            assert applied == (micro + 1 == accumulation)
    return engine.module_state_dict()


def check_batch_size():
    engine = start(2)[1]
    assert engine.train_batch_size() == 4
    steps_of(engine, 1, 1)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 2)
    got = steps_of(engine, 2, 2)
    other = start(2)[1]
    steps_of(other, 1, 1)
    other.set_gradient_accumulation_boundary(False)
    for step in range(2):
        for micro in range(2):
            tokens, targets = models.batches(8, 8)[2 * step + micro]
            rows = slice(2 * other.global_rank, 2 * other.global_rank + 2)
            other.set_gradient_accumulation_boundary(micro == 1)
            other.backward(other(tokens[rows], targets[rows]) / 2)
            other.step()
    want = other.module_state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)

    with pytest.raises(ValueError, match=r"set_train_batch_size\(6\): expected a multiple of 4"):
        engine.set_train_batch_size(6)
    with pytest.raises(NotImplementedError, match="must come from engine"):
        steps_of(engine, 2, 1, plain=True)
    engine.zero_grad()
    engine.set_train_batch_size(4)
    steps_of(engine, 1, 1)


def test_the_batch_of_a_step_changes_while_an_engine_runs():
    run_processes(2, check_batch_size)


def check_kinds():
    interface()
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler
    from deepspeed.runtime.lr_schedules import WARMUP_LR, OneCycle, WarmupLR
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds = (FP16_Optimizer, BF16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    for stage, precision, expected in ((0, "fp16", 0), (0, "bf16", 1), (2, "fp32", 2), (3, "bf16", 3)):
        extra = {"fp16": {"enabled": precision == "fp16"}, "bf16": precision == "bf16"}
        schedule = {"type": WARMUP_LR, "params": {"warmup_num_steps": 3}}
        _, engine, optimizer, scheduler = start(stage, scheduler=schedule, **extra)
        assert [isinstance(optimizer, kind) for kind in kinds] == [place == expected for place in range(4)]
        assert isinstance(scheduler, WarmupLR) and not isinstance(scheduler, OneCycle)
        assert scheduler.get_mom() == engine.get_mom()
        if precision == "fp16":
            assert isinstance(optimizer.loss_scaler, DynamicLossScaler) and optimizer.dynamic_loss_scale
            before = optimizer.loss_scaler.cur_scale
            train(engine, 0, 1)
            assert optimizer.loss_scaler.cur_iter == 1 and before == 65536
        engine.destroy()
    with pytest.raises(NotImplementedError, match=r"deepspeed\.initialize makes the optimizer"):
        FP16_Optimizer(None)

    arguments = {"init_scale": 16.0, "scale_window": 2, "min_scale": 4.0, "delayed_shift": 2}
    scaler = CreateLossScaler(torch.half, 1.0, True, {**arguments, "consecutive_hysteresis": False})
    seen = []
    for overflow in (True, True, True, False, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.cur_scale)
    assert seen == [16, 8, 4, 4, 4, 8, 8]
    assert isinstance(CreateLossScaler(torch.float, 8.0, True, None), LossScaler)


def test_classes_say_which_optimizer_and_schedule_initialize_made():
    run_processes(1, check_kinds)


def check_small_things(folder):
    deepspeed, engine, *_ = start(1)
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    rank = engine.global_rank
    tensors = [torch.arange(5.0) * (rank + 1), torch.full((4,), float(rank)), torch.ones(1)]
    means = [torch.arange(5.0) * 1.5, torch.full((4,), 0.5), torch.ones(1)]
    for got, mean in zip(reduce_scatter_coalesced(tensors), means):
        size = -(-mean.numel() // 2)
        assert torch.equal(got, mean[rank * size : rank * size + size])
    whole = [torch.empty(4), torch.empty(2)]
    deepspeed.comm.all_gather_coalesced(whole, [torch.full((2,), float(rank)), torch.full((1,), 9.0 + rank)])
    assert whole[0].tolist() == [0, 0, 1, 1] and whole[1].tolist() == [9, 10]

    with engine.no_sync():
        train_backward(engine)
        with pytest.raises(AssertionError, match="inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="no_sync context manager reentry"), engine.no_sync():
            pass
    train_backward(engine)
    assert engine.step().applied
    with pytest.raises(AssertionError, match="incompatible with ZeRO stage 2"), start(2)[1].no_sync():
        pass

    data = torch.utils.data.TensorDataset(torch.arange(8))
    seen = [batch[0] for batch in engine.deepspeed_io(data, batch_size=2, route="eval")]
    assert [len(batch) for batch in seen] == [2, 2] and torch.equal(torch.cat(seen), torch.cat(seen).sort().values)
    everywhere = [torch.empty(4, dtype=torch.long) for _ in range(2)]
    torch.distributed.all_gather(everywhere, torch.cat(seen))
    assert torch.cat(everywhere).sort().values.tolist() == list(range(8))
    shuffled = torch.cat([batch[0] for batch in engine.deepspeed_io(data)])
    assert not torch.equal(shuffled, torch.cat(seen))
    sampler = torch.utils.data.SequentialSampler(data)
    assert len(engine.deepspeed_io(data, batch_size=4, data_sampler=sampler)) == 2

    path = f"{folder}/twice-{rank}.json"
    with open(path, "w") as file:
        file.write('{"train_batch_size": 4, "fp16": {"enabled": false, "enabled": true}}')
    with pytest.raises(deeptide.ConfigError, match="more than once: enabled"):
        deepspeed.DeepSpeedConfig(path)
    with pytest.raises(AssertionError, match="requires a model: got None"):
        deepspeed.initialize(config=models.config(0))


def train_backward(engine):
    tokens, targets = models.batches(1, 8)[0]
    engine.backward(engine(tokens[:2], targets[:2]))


def test_small_things_do_as_deepspeeds(tmp_path):
    run_processes(2, check_small_things, str(tmp_path))


def check_readers():
    interface()
    from deepspeed.elasticity import compute_elastic_config
    from deepspeed.elasticity.config import ElasticityError
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
    from deepspeed.runtime.utils import clip_tensors_by_global_norm, get_global_norm_of_tensors
    from deepspeed.utils import set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix, z3_leaf_module
    from deepspeed.utils.numa import parse_range_list

    with pytest.raises(ElasticityError):
        compute_elastic_config({"elasticity": {"enabled": True}}, "0.19.8")
    logger = __import__("deepspeed").utils.logger
    engine = start(0, log_level="ERROR")[1]
    assert engine.log_level() == "ERROR" and logger.getEffectiveLevel() == 40
    given = json.loads('{"optimizer": {"type": "Adam", "params": {"lr": 1}}, "bfloat16": {"enabled": true}}')
    assert config.get_optimizer_name(given) == "Adam" and config.get_gradient_clipping(given) == 1.0
    assert config.get_scheduler_params(given) is None
    assert precision_config.get_bfloat16_config(given).enabled
    with pytest.raises(ValueError, match="must be a number of at least 0"):
        precision_config.DeepSpeedFP16Config(loss_scale=-1)
    assert __compatible_ops__["cpu_adam"] and not __compatible_ops__["async_io"]
    assert parse_range_list("0-2,5") == [0, 1, 2, 5]
    with pytest.raises(ValueError, match="numbers must grow"):
        parse_range_list("3,1")

    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert get_global_norm_of_tensors(tensors) == 5 and clip_tensors_by_global_norm(tensors, 1.0) == 5
    assert tensors[0].item() == pytest.approx(0.6, rel=1e-5)
    assert get_global_norm_of_tensors([torch.tensor([float("nan")])]) == -1

    model = torch.nn.ModuleDict({"a": torch.nn.ReLU(), "b": torch.nn.ModuleDict({"a": torch.nn.GELU()})})
    assert set_z3_leaf_modules_by_name(model, ["b.a", "c"], raise_if_not_found=False) == ([model["b"]["a"]], ["c"])
    assert set_z3_leaf_modules_by_suffix(model, ["a"])[0] == [model["a"], model["b"]["a"]] and z3_leaf_module(
        model["a"]
    )
    with pytest.raises(ValueError, match=r"no modules of these names in ModuleDict: \['c'\]"):
        set_z3_leaf_modules_by_name(model, ["c"])

    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    held = optimizer.param_groups[1]["lr"]
    WarmupLR(optimizer, warmup_num_steps=4).step(4)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])
    assert optimizer.param_groups[1]["lr"] is held
    cycle = OneCycle(optimizer, [0.1, 0.2], [1.0, 2.0], cycle_first_step_size=5, cycle_min_mom=[0.8, 0.7])
    cycle.step(4)
    assert cycle.get_lr() == pytest.approx([1.0, 2.0]) and cycle.get_mom() == [(0.8, 0.99), (0.7, 0.99)]
    for wrong in ({"cycle_first_step_size": 0}, {"cycle_max_mom": [1, 2, 3]}):
        with pytest.raises(ValueError, match="got"):
            OneCycle(optimizer, 0.1, 1.0, **wrong)
    with pytest.raises(ValueError, match="warmup_num_steps: got None, expected an integer of at least 1"):
        WarmupLR(optimizer, warmup_num_steps=None)


def test_readers_of_configurations_and_schedules_made_by_hand():
    run_processes(1, check_readers)
