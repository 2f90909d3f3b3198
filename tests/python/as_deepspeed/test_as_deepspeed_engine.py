# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Tries what deepspeed.initialize of the interface returns, in real processes: the engine, its states, zero.Init."""

import importlib
import json
import math
import os
import re
import sys

import models
import pytest
import torch
from conftest import run_processes

import deeptide

pytestmark = pytest.mark.both_ways


def interface():
    """`import deepspeed`, as Deeptide's."""
    importlib.import_module("deeptide.as_deepspeed")
    return importlib.import_module("deepspeed")


def start(stage=0, model=None, **extra):
    """(deepspeed, engine, optimizer, scheduler) of a small model."""
    deepspeed = interface()
    torch.set_num_threads(1)
    model = models.make_model() if model is None else model
    config = models.config(stage, **extra)
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=config)
    return deepspeed, engine, optimizer, scheduler


def train(engine, first=0, last=2):
    losses = []
    for step in range(first, last):
        tokens, targets = models.batches(step + 1, 8)[step]
        rows = slice(2 * engine.global_rank, 2 * engine.global_rank + 2)
        loss = engine(tokens[rows], targets[rows])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def native_losses(stage, steps, **extra):
    engine, *_ = deeptide.initialize(model=models.make_model(), config=models.config(stage, **extra))
    losses = train(engine, 0, steps)
    engine.destroy()
    return losses


def check_engine(stage):
    deepspeed, engine, optimizer, _ = start(stage, steps_per_print=math.inf)
    import torch.distributed as dist

    assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, torch.nn.Module)
    assert not isinstance(engine, deepspeed.PipelineEngine)
    assert dist.is_initialized()
    assert engine.config["zero_optimization"]["stage"] == stage and engine.config["steps_per_print"] == math.inf
    assert {name.split(".")[0] for name, _ in engine.named_parameters()} == {"module"}
    assert engine.h is engine.module.h
    assert engine.optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer)
    assert engine.train() is engine and engine.training and engine.module.training
    losses = train(engine)
    engine.zero_grad()
    assert engine.overflow is False and engine.was_step_applied()
    assert engine.get_global_grad_norm() > 0
    engine.eval()
    assert not engine.training and not engine.module.training
    engine.destroy()
    assert losses == native_losses(stage, 2)


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_is_the_native_one_inside_a_module(stage):
    run_processes(2, check_engine, stage)


def check_world_of_one():
    import torch.distributed as dist

    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    deepspeed, engine, *_ = start(3)
    assert dist.get_world_size() == deepspeed.comm.get_world_size() == 1
    losses = train(engine)
    engine.destroy()
    assert losses == native_losses(3, 2)


def test_a_world_of_one_has_a_process_group():
    run_processes(1, check_world_of_one)


def check_windows(stage):
    """Steps like Accelerate: the boundary is set by hand, several backwards, one step."""
    _, engine, *_ = start(stage, gas=2)
    _, whole, *_ = start(stage, gas=1, micro=4)
    for step in range(2):
        tokens, targets = models.batches(step + 1, 8)[step]
        mine = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        for half in range(2):
            rows = slice(mine.start + 2 * half, mine.start + 2 * half + 2)
            engine.set_gradient_accumulation_boundary(is_boundary=half == 1)
            engine.backward(engine(tokens[rows], targets[rows]))
        engine.step()
        whole.backward(whole(tokens[mine], targets[mine]))
        whole.step()
        assert math.isclose(engine.get_global_grad_norm(), whole.get_global_grad_norm(), rel_tol=1e-4)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_many_backwards_and_one_step_are_one_large_batch(stage):
    run_processes(2, check_windows, stage)


def check_states(stage, folder):
    deepspeed, engine, *_ = start(stage, zero={"stage3_gather_16bit_weights_on_model_save": True})
    assert engine.zero_gather_16bit_weights_on_model_save()
    train(engine)
    state = {"step": 2, "shape": torch.Size([2, 3]), "tensor": torch.arange(3), 5: {1.5}}
    path = engine.save_checkpoint(folder, client_state=state)
    assert os.path.basename(path) == "global_step2"
    assert os.path.isfile(os.path.join(folder, "zero_to_fp32.py"))
    engine.save_checkpoint(folder, client_state={"plain": [1, "x"]})  # the same tag again
    losses = train(engine, 2, 3)
    whole = engine.whole_state()
    again = start(stage)[1]
    loaded, client = again.load_checkpoint(folder, tag="global_step2")
    assert loaded == path and client == {"plain": [1, "x"]}
    assert train(again, 2, 3) == losses
    engine.save_checkpoint(folder, tag="other", client_state=state)
    _, client = again.load_checkpoint(folder)
    assert client["step"] == 2 and client["shape"] == torch.Size([2, 3]) and client[5] == {1.5}
    assert torch.equal(client["tensor"], torch.arange(3))
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    for name, value in read.items():
        assert torch.equal(value, whole[name].float()), name
    assert set(whole) - set(read) == {"head.weight"}  # tied to the embedding
    plain = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(models.make_model(), folder)
    assert torch.equal(plain.head.weight, whole["head.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_keep_any_client_state_and_give_whole_weights(stage, tmp_path):
    run_processes(2, check_states, stage, str(tmp_path))


def check_consolidated(folder):
    _, engine, *_ = start(3, zero={"stage3_gather_16bit_weights_on_model_save": True}, bf16=True)
    engine.module.norm.weight.requires_grad_(False)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (engine.global_rank != 0)
    if state is not None:
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert state["embed.weight"].dtype == torch.bfloat16
    small = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if small is not None:
        assert set(state) - set(small) == {"norm.weight"}
    assert engine.save_16bit_model(folder, "model.bin") and engine.save_16bit_model(folder, "model.safetensors")
    torch.distributed.barrier()
    from safetensors.torch import load_file

    first = torch.load(os.path.join(folder, "model.bin"))
    second = load_file(os.path.join(folder, "model.safetensors"))
    assert set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_whole_weights_on_rank_0_only(tmp_path):
    pytest.importorskip("safetensors")
    run_processes(2, check_consolidated, str(tmp_path))


def check_saves_without_safetensors(folder):
    sys.modules["safetensors"] = None  # as if it were not installed
    _, engine, *_ = start(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    with pytest.raises(ImportError, match="pip install safetensors, or choose another ending"):
        engine.save_16bit_model(folder, "model.safetensors")
    assert engine.save_16bit_model(folder, "model.bin")


def test_a_package_that_is_missing_is_an_error_on_all_ranks(tmp_path):
    run_processes(2, check_saves_without_safetensors, str(tmp_path))
    assert os.listdir(tmp_path) == ["model.bin"]


def check_no_consolidation_below_stage_3():
    _, engine, *_ = start(2)
    with pytest.raises(ValueError, match="requires ZeRO-3"):
        engine._zero3_consolidated_16bit_state_dict()


def test_consolidation_is_a_value_error_below_stage_3():
    run_processes(1, check_no_consolidation_below_stage_3)


def check_again(stage):
    """Trainers destroy and make an engine for each train(); trl makes one for inference first, and keeps it."""
    deepspeed = interface()
    model = models.make_model()
    config = models.config(stage)
    idle, nothing, *_ = deepspeed.initialize(
        model=model, config={key: config[key] for key in config if key != "optimizer"}, model_parameters=[]
    )
    tokens, targets = models.batches(1, 8)[0]
    with torch.no_grad():
        before = idle(tokens, targets)
    assert (nothing is None) == (stage != 3)
    losses = []
    for _ in range(2):
        engine = deepspeed.initialize(model=model, config=config)[0]
        losses += train(engine, 0, 2)
        engine.destroy()
        with torch.no_grad():
            after = model(tokens, targets)
        assert all(parameter.data_ptr() for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(idle(tokens, targets), after)
    assert float(after) < float(before) and losses[2] < losses[0]
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_is_trained_again_by_another_engine(stage):
    run_processes(2, check_again, stage)


def check_construction(stage):
    """Builds like Transformers: ranks hold anything, rank 0 loads inside GatheredParameters, in an order of its own."""
    deepspeed = interface()
    config = models.config(stage)
    torch.manual_seed(int(os.environ["RANK"]))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = models.TinyModel()
    rank = torch.distributed.get_rank()
    parameters = list(model.parameters())
    assert all(p.ds_numel == p.numel() and p.ds_id == number for number, p in enumerate(parameters))
    foreign = torch.nn.Parameter(torch.full((2,), float(rank)))
    shuffled = [*parameters, foreign] if rank == 0 else [foreign, *reversed(parameters)]
    with deepspeed.zero.GatheredParameters(shuffled, modifier_rank=0):
        if rank == 0:
            for number, parameter in enumerate(parameters):
                torch.nn.init.constant_(parameter, number / 100)
    for number, parameter in enumerate(parameters):
        assert torch.equal(parameter, torch.full_like(parameter, number / 100))
    assert torch.equal(foreign, torch.full((2,), float(rank)))
    engine = deepspeed.initialize(model=model, config=config)[0]
    train(engine)
    # With an engine: whole on every rank inside, no other rank needed, rank 1's values everywhere afterwards.
    with deepspeed.zero.GatheredParameters(shuffled[::-1], modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                assert parameters[0].sum().isfinite()
                parameters[0].copy_(torch.full_like(parameters[0], 0.5))
                parameters[1].data.fill_(0.25)
    state = engine.whole_state()
    names = [name for name, _ in model.named_parameters()]
    assert torch.equal(state[names[0]], torch.full_like(state[names[0]], 0.5))
    assert torch.equal(state[names[1]], torch.full_like(state[names[1]], 0.25))
    master = deepspeed.utils.safe_get_full_fp32_param(parameters[1])
    assert torch.equal(master, torch.full_like(master, 0.25))
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=False):
        pass
    with pytest.raises(KeyError), deepspeed.zero.GatheredParameters(parameters[0]):
        raise KeyError
    train(engine, 2, 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_construction_and_gathered_parameters(stage):
    run_processes(2, check_construction, stage)


def check_compiled(stage):
    plain = start(stage)[1]
    expected = train(plain)
    plain.destroy()
    _, engine, *_ = start(stage)
    assert engine.is_compiled is False
    engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled is True
    assert train(engine) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.costly
@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_engine_trains_alike(stage):
    run_processes(2, check_compiled, stage)


# -- one rank is enough --------------------------------------------------------------------------------------------


def check_refusals():
    deepspeed, engine, *_ = start(0)
    not_supported = importlib.import_module("deeptide.as_deepspeed").NotSupportedError
    for use, text in (
        (lambda: engine.allreduce_gradients(), "gradients are reduced by engine.step"),
        (lambda: engine.compile(schedule=[]), "there is no DeepCompile"),
        (
            lambda: deepspeed.initialize(model=models.make_model(), config=models.config(0), mesh_param=(1, 1)),
            "mesh_param",
        ),
    ):
        with pytest.raises(not_supported, match=text):
            use()
    with pytest.raises(AttributeError, match="neither Deeptide's engine, under DeepSpeed's names, nor its TinyModel"):
        print(engine.no_such_thing)
    with pytest.raises(ValueError, match=r"set_train_batch_size\(63\): expected a multiple of 2"):
        engine.set_train_batch_size(63)
    with pytest.raises(ValueError, match="set_train_micro_batch_size"):
        engine.set_train_micro_batch_size(64)
    assert engine.random_ltd_enabled() is False and engine.zero_offload_param() is None
    assert engine.optimizer_name() == "adamw" and engine.optimizer_params()["lr"] == 1e-2


def test_what_an_engine_does_not_have_is_named():
    run_processes(1, check_refusals)


def check_translation(folder):
    interface()
    configuration = importlib.import_module("deeptide.as_deepspeed.config.configuration")
    given = {
        "steps_per_print": math.inf,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}},
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 64,
        "nowhere.else": 1,
        "msamp": {"enabled": False},
        "_comment": "kept",
    }
    config, lines = configuration.translate(given)
    assert config == {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "stage3_prefetch_bucket_size": 3686},
        "_comment": "kept",
    }
    assert given["steps_per_print"] == math.inf  # the caller's own dictionary stays
    assert [line.split(":")[0] for line in lines] == [
        "steps_per_print",
        "zero_optimization.stage3_prefetch_bucket_size",
        "nowhere.else",
        "msamp",
        *([] if torch.cuda.is_available() else ["zero_optimization.offload_optimizer"]),
    ]
    path = os.path.join(folder, "config.json")
    with open(path, "w") as file:
        file.write('{"train_batch_size": 4, /* "x" */ "optimizer": {"type": "AdamW",}, // "y"\n "_a": "//b",}')
    read = configuration.DeepSpeedConfig(path)
    assert read.train_batch_size == 4 and read.optimizer_name == "adamw" and read._param_dict["_a"] == "//b"
    with open(path, "w") as file:
        file.write('{"zero_optimization": {"stage": 7}}')
    with pytest.raises(deeptide.ConfigError, match="from 0 to 3, got 7"):
        configuration.read_config(path)
    with pytest.raises(deeptide.ConfigError, match=r"zero_optimization\.stag: unknown key"):
        configuration.read_config({"zero_optimization": {"stag": 1}})


def test_configurations_are_translated_line_by_line(tmp_path):
    run_processes(1, check_translation, str(tmp_path))


SHARED = {"tensor_parallel": {"autotp_size": 2}}
OF_EIGHT_RANKS = [  # (given, the samples of a step, or what the error says)
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 24),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 24),
    ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, 24),
    ({"train_batch_size": 48}, 24),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 24),
    ({"train_batch_size": 48, "parallel": {"data": "auto"}}, 48),
    (
        {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
        "20 != 2 * 3 * 4",
    ),
]


def check_batches_of_shared_layers():
    interface()
    configuration = importlib.import_module("deeptide.as_deepspeed.config.configuration")
    for given, expected in OF_EIGHT_RANKS:
        given, parsed = configuration.read_config({**given, **SHARED})
        parsed = configuration.counted_once(given, parsed, 8)
        if isinstance(expected, int):
            assert parsed.batch_sizes(4).train == expected, given
            continue
        with pytest.raises(deeptide.ConfigError, match=re.escape(expected)):
            parsed.batch_sizes(4)
    alone, parsed = configuration.read_config({"train_batch_size": 48})
    assert configuration.counted_once(alone, parsed, 8) is parsed


def test_a_batch_that_ranks_which_share_layers_count_each_is_counted_once():
    run_processes(1, check_batches_of_shared_layers)


SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_max_lr": 1.0, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
}


def check_schedules(text):
    for name, params in json.loads(text).items():
        deepspeed, engine, _, scheduler = start(0, scheduler={"type": name, "params": params})
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        by_hand = getattr(deepspeed.runtime.lr_schedules, name)(optimizer, **params)
        assert name in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
        for step in range(12):
            train(engine, 0, 1)
            by_hand.step()
            assert math.isclose(engine.get_lr()[0], by_hand.get_last_lr()[0], rel_tol=1e-12, abs_tol=1e-15), (
                name,
                step,
            )
            if name == "OneCycle":
                assert math.isclose(engine.get_mom()[0][0], optimizer.param_groups[0]["betas"][0], rel_tol=1e-12)
        assert by_hand.state_dict() == scheduler.state_dict()
        engine.destroy()


def test_schedules_made_by_hand_are_those_of_the_core():
    run_processes(1, check_schedules, json.dumps(SCHEDULES))


def check_optimizers():
    deepspeed = interface()
    values = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    expected = native_losses(0, 2)
    for make in (deepspeed.ops.adam.FusedAdam, deepspeed.ops.adam.DeepSpeedCPUAdam, torch.optim.AdamW):
        model = models.make_model()
        groups = [{"params": list(model.parameters()), "lr_mult": 1.0, "name": "all"}]
        config = {key: value for key, value in models.config(0).items() if key != "optimizer"}
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config, optimizer=make(groups, **values))
        assert train(engine) == expected, make
        assert optimizer.param_groups[0]["lr_mult"] == 1.0
    seen = {tuple(native_losses(0, 4))}
    for make, name, defaults in (
        (deepspeed.ops.lion.FusedLion, "Lion", {"betas": [0.9, 0.999]}),
        (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, "Adagrad", {"eps": 1e-10}),
        (deepspeed.ops.lamb.fused_lamb.FusedLamb, "Lamb", {"betas": [0.9, 0.999], "eps": 1e-8}),
    ):
        model = models.make_model()
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=make(model.parameters(), lr=1e-3))
        params = {"lr": 1e-3, "weight_decay": 0.0, **defaults}
        expected = native_losses(0, 4, optimizer={"type": name, "params": params})
        assert train(engine, 0, 4) == expected, name
        assert tuple(expected) not in seen, name
        seen.add(tuple(expected))
    with pytest.raises(deeptide.ConfigError, match="amsgrad=True is not supported"):
        deepspeed.ops.adam.FusedAdam(model.parameters(), amsgrad=True)
    with pytest.raises(RuntimeError, match="whose engine steps"):
        deepspeed.ops.lion.FusedLion(model.parameters()).step()


def test_optimizers_of_deepspeeds_classes_are_run():
    run_processes(1, check_optimizers)
