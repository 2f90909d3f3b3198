# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Asks of the interface what scripts ask beside training: older spellings, accessors, helpers that they import."""

import json
import os

import models
import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface, start, train


def check_batches_past_the_engine(folder):
    deepspeed, engine, *_ = start(2)
    _, other, *_ = start(2)
    train(engine), train(other)
    tokens, targets = models.batches(1, 8)[0]
    engine.module(tokens, targets).backward()
    engine.zero_grad()
    assert train(engine, 2, 3) == train(other, 2, 3)
    assert engine.get_global_grad_norm() == other.get_global_grad_norm()
    engine.module.norm.weight.grad = torch.ones(20)
    engine.zero_grad()
    assert engine.module.norm.weight.grad is None

    engine.save_checkpoint(folder, "first", client_sd={"step": 3})
    _, client_sd = engine.load_checkpoint(folder, "first")
    assert client_sd == {"step": 3}
    with pytest.raises(TypeError, match="client_state and client_sd"):
        engine.save_checkpoint(folder, "first", {"a": 1}, client_sd={"step": 3})

    deepspeed, engine, *_ = start(3, frozen(models.make_model()))
    train(engine)
    path = engine.save_checkpoint(folder, "adapters", exclude_frozen_parameters=True)
    engine.save_checkpoint(folder, "whole")
    again = start(3, frozen(models.make_model()))[1]
    again.load_checkpoint(folder, "adapters")
    assert train(again, 2, 3) == train(engine, 2, 3)
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    assert set(read(folder, "adapters")) == set(read(folder, "whole")) - {"embed.weight"}
    assert os.path.basename(path) == "adapters"


def frozen(model):
    model.embed.weight.requires_grad_(False)
    return model


def test_gradients_past_the_engine_are_dropped_and_older_spellings_work(tmp_path):
    run_processes(2, check_batches_past_the_engine, str(tmp_path))


def check_accessors():
    interface()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    plain = start(0)[1]
    assert plain.zero_offload_param() is None and plain.zero_offload_optimizer() is None
    assert not (plain.zero_cpu_offload() or plain.zero_has_nvme_offload() or plain.zero_use_cpu_optimizer())
    assert plain.zero_partial_offload() == 1.0 and plain.communication_data_type is torch.float32
    assert plain.zero_reduce_bucket_size() == 500_000_000 and plain.zero_overlap_comm() is False
    assert plain.pld_enabled() is False and plain.pld_theta() == 1.0 and plain.random_ltd_enabled() is False
    assert plain.checkpoint_tag_validation_enabled() and not plain.checkpoint_tag_validation_fail()
    assert plain.postscale_gradients() and plain.gradient_predivide_factor() == 1.0
    assert plain.sparse_tensor_module_names == set()
    zero = {
        "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True},
        "reduce_bucket_size": 1_000_000,
        "stage3_max_live_parameters": 7_000_000,
        "stage3_prefetch_bucket_size": 50_000,
        "overlap_comm": False,
        "round_robin_gradients": True,
    }
    engine = start(3, zero=zero, bf16=True, prescale_gradients=True, checkpoint={"tag_validation": "Fail"})[1]
    assert engine.zero_cpu_offload() and engine.zero_use_cpu_optimizer() and not engine.zero_has_nvme_offload()
    assert engine.zero_partial_offload() == 0.5 and engine.zero_offload_optimizer().pin_memory is True
    assert engine.zero_offload_optimizer().device is OffloadDeviceEnum.cpu
    assert engine.zero_reduce_bucket_size() == 1_000_000 and engine.zero_max_live_parameters() == 7_000_000
    assert engine.zero_prefetch_bucket_size() == 50_000 and engine.zero_overlap_comm() is False
    assert engine.zero_round_robin_gradients() is True and engine.zero_allgather_bucket_size() == 500_000_000
    assert engine.communication_data_type is torch.bfloat16 and not engine.postscale_gradients()
    assert engine.checkpoint_tag_validation_fail()
    loss = engine(*models.batches(1, 2)[0])
    assert engine.scale(loss) is loss

    section = DeepSpeedZeroConfig(stage=3, stage3_max_live_parameters=5, offload_param={"device": "nvme"})
    assert section.stage == ZeroStageEnum.weights == 3 and section.max_live_parameters == 5
    assert section.offload_param.device == "nvme" and section.overlap_comm is True
    assert DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == "cpu"
    assert section.model_dump()["offload_param"]["buffer_count"] == 5
    with pytest.raises(ValueError, match="unknown key 'stagee'; expected one of stage, "):
        DeepSpeedZeroConfig(stagee=1)
    with pytest.raises(ValueError, match="stage: got 7, expected 0, 1, 2 or 3"):
        DeepSpeedZeroConfig(stage=7)


def test_accessors_answer_from_the_configuration():
    run_processes(1, check_accessors)


def check_helpers():
    interface().init_distributed()
    from deepspeed.runtime.utils import (
        CheckOverflow,
        clip_grad_norm_,
        get_global_norm,
        get_global_norm_of_tensors,
        get_grad_norm,
        partition_balanced,
        partition_uniform,
    )

    from deeptide.as_deepspeed import NotSupportedError

    assert get_global_norm([3.0, 4.0]) == 5.0
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert float(get_grad_norm(p)) == 5.0 and float(clip_grad_norm_([p], 2.5)) == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([1.5, 2.0]))
    rank = torch.distributed.get_rank()
    assert not CheckOverflow([[p]]).check()
    p.grad[0] = float("inf") if rank == 1 else 1.0
    assert CheckOverflow([[p]]).check() and CheckOverflow().has_overflow_serial([p]) == (rank == 1)
    assert CheckOverflow().check_using_norm([-1 if rank == 0 else 2.0])
    engine = start(2)[1]
    engine.backward(engine(*models.batches(1, 2)[0]))
    with pytest.raises(NotSupportedError, match='write "gradient_clipping" into the configuration'):
        clip_grad_norm_(engine.module.parameters(), 1.0)
    with pytest.raises(NotSupportedError, match="this rank's tensors alone"):
        clip_grad_norm_([p], 1.0, mpu=object())
    with pytest.raises(NotSupportedError, match="this rank's tensors alone"):
        get_global_norm_of_tensors([p], mpu=object())

    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10] and partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    # The cuts of DeepSpeed 0.19.8: of equally even ones, the later.
    for weights, parts, bounds in (
        ([1, 1, 1, 9, 1, 1], 3, [0, 3, 4, 6]),
        ([1, 1, 1, 1, 1], 4, [0, 2, 3, 4, 5]),
        ([2, 2, 2, 2, 2, 2, 2], 3, [0, 3, 5, 7]),
        ([0, 3, 0, 3, 1, 1, 2], 3, [0, 3, 5, 7]),
        ([5, 1, 1, 1, 1, 1, 5], 4, [0, 1, 4, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 2, [0, 6, 9]),
    ):
        assert partition_balanced(weights, parts) == bounds


def test_norms_overflow_and_partitions():
    run_processes(2, check_helpers)


def check_imports():
    os.environ.pop("LOCAL_WORLD_SIZE")
    deepspeed = interface()
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.checkpoint import ORIGINAL_VOCAB_SIZE
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, ZERO_STAGE
    from deepspeed.elasticity import ensure_immutable_elastic_config
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, UtilsBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.runtime.constants import TRAIN_BATCH_SIZE
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    from deeptide.as_deepspeed import NotSupportedError

    assert (OPTIMIZER_STATE_DICT, ZERO_STAGE, TRAIN_BATCH_SIZE) == (
        "optimizer_state_dict",
        "zero_stage",
        "train_batch_size",
    )
    assert issubclass(ZeRORuntimeException, Exception) and callable(ensure_immutable_elastic_config)
    cpu = CPU_Accelerator()
    assert ORIGINAL_VOCAB_SIZE == "original_vocab_size"
    assert cpu.get_op_builder("CPUAdamBuilder") is CPUAdamBuilder
    assert isinstance(cpu.create_op_builder("CPUAdamBuilder"), CPUAdamBuilder)
    assert cpu.get_op_builder("FlashAttentionBuilder") is cpu.create_op_builder("FlashAttentionBuilder") is None
    assert cpu.device_name() == "cpu" and isinstance(cpu, deepspeed.accelerator.DeepSpeedAccelerator)
    for size, expected in ((None, 1), ("3", 3), ("0", 1)):
        os.environ.update({} if size is None else {"LOCAL_SIZE": size})
        assert cpu.device_count() == expected
    del os.environ["LOCAL_SIZE"]
    assert (
        CPUAdamBuilder().is_compatible()
        and CPUAdamBuilder().load().DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam
    )
    assert FusedAdamBuilder.NAME == "fused_adam" and ALL_OPS["fused_adam"] is FusedAdamBuilder
    with pytest.raises(NotSupportedError, match=r"CPUAdamBuilder\(\)\.load\(\)\.create_adam is not here"):
        CPUAdamBuilder().load().create_adam(0)
    flat = UtilsBuilder().load().flatten([torch.ones(2), torch.zeros(1)])
    assert flat.tolist() == [1, 1, 0]
    assert not AsyncIOBuilder().is_compatible()
    with pytest.raises(NotSupportedError, match="offload_param"):
        AsyncIOBuilder().load()


def check_timers():
    deepspeed = interface()
    from deepspeed.utils import safe_update_full_grad_vectorized
    from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

    timers = SynchronizedWallClockTimer()
    timers("a").start()
    assert timers("a").elapsed(reset=False) > 0 and timers("a").started_
    timers("a").stop(record=True)
    with pytest.raises(RuntimeError, match="is not started"):
        timers("a").stop()
    assert timers.get_mean(["a", "b"])["a"] > 0 and timers("a").elapsed() == 0
    said = []
    speed = ThroughputTimer(None, 8, start_step=1, steps_per_output=2, logging_fn=said.append)
    assert speed.avg_samples_per_sec() < 0
    for _ in range(4):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0 and [line.split(",")[0][-13:] for line in said] == [
        "global_step=2",
        "global_step=4",
    ]

    engine = start(2)[1]
    engine.backward(engine(*models.batches(1, 2)[0]))
    gradient = deepspeed.utils.safe_get_full_grad(engine.module.norm.weight)
    safe_update_full_grad_vectorized([engine.module.norm.weight], lambda grad, param: grad * 2)
    assert torch.equal(deepspeed.utils.safe_get_full_grad(engine.module.norm.weight), gradient * 2)


def test_modules_that_scripts_import_at_the_top_are_there():
    run_processes(1, check_imports)


def test_timers_and_vectorised_updates_of_gradients():
    run_processes(1, check_timers)


def check_one_bit():
    interface()
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    values = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    for make, name, options in (
        (OnebitAdam, "OneBitAdam", {"freeze_step": 2}),
        (OnebitLamb, "OneBitLamb", {"freeze_step": 2, "coeff_beta": 0.8}),
        (ZeroOneAdam, "ZeroOneAdam", {"var_freeze_step": 2}),
    ):
        params = {**values, "betas": list(values["betas"]), **options}
        by_name = start(0, optimizer={"type": name, "params": params})[1]
        model = models.make_model()
        config = {key: value for key, value in models.config(0).items() if key != "optimizer"}
        given = interface().initialize(
            model=model, optimizer=make(model.parameters(), deepspeed=None, **values, **options), config=config
        )[0]
        assert train(given, 0, 4) == train(by_name, 0, 4), name
    with pytest.raises(ValueError, match="local_step_clipper=16 is not supported"):
        ZeroOneAdam(model.parameters(), local_step_clipper=16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'freeze'"):
        OnebitAdam(model.parameters(), freeze=3)


@pytest.mark.costly
def test_one_bit_optimizers_made_by_hand_step_as_the_configurations():
    run_processes(2, check_one_bit)


def check_weight_files(folder):
    deepspeed = interface()
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
    from safetensors import safe_open
    from safetensors.torch import load_file

    engine = start(3, bf16=True)[1]
    train(engine)
    engine.save_checkpoint(folder)
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    whole = read(folder)
    lazy = read(folder, lazy_mode=True)
    assert all(lazy[name].shape == value.shape and lazy[name].dtype == value.dtype for name, value in whole.items())
    assert all(torch.equal(lazy[name].contiguous(), value) for name, value in whole.items())
    for safe, stem, load in ((True, "model{}.safetensors", load_file), (False, "pytorch_model{}.bin", torch.load)):
        out = os.path.join(folder, f"out-{safe}")
        convert(folder, out, safe_serialization=safe)
        assert os.listdir(out) == [stem.format("")]
        assert_equal(load(os.path.join(out, stem.format(""))), whole)
        out += "-small"
        convert(folder, out, "8KB", safe)
        with open(os.path.join(out, stem.format("") + ".index.json")) as file:
            index = json.load(file)
        files = sorted(set(index["weight_map"].values()))
        count = len(files)
        assert count > 3 and files == [stem.format(f"-{i:05d}-of-{count:05d}") for i in range(1, count + 1)]
        assert sorted(os.listdir(out)) == sorted([*files, stem.format("") + ".index.json"])
        assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in whole.values())
        found = {}
        for name in files:
            part = load(os.path.join(out, name))
            assert set(part) == {key for key, at in index["weight_map"].items() if at == name}
            assert sum(4 * value.numel() for value in part.values()) <= 8000
            found.update(part)
        assert_equal(found, whole)
        if safe:
            with safe_open(os.path.join(out, files[0]), "pt") as file:
                assert file.metadata() == {"format": "pt"}
    with pytest.raises(ValueError, match=r"max_shard_size: got '5 parsecs', expected bytes such as"):
        convert(folder, out, "5 parsecs")


def assert_equal(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_whole_weights_are_written_in_files_of_a_size(tmp_path):
    pytest.importorskip("safetensors")
    run_processes(1, check_weight_files, str(tmp_path))


def test_hosts_and_slots_are_read_as_deepspeed_reads_them(tmp_path):
    interface()
    from deepspeed.launcher import constants, runner

    (tmp_path / "hosts").write_text("# two\n\na slots=2\nb slots=3\n")
    hosts = runner.fetch_hostfile(str(tmp_path / "hosts"))
    assert list(hosts.items()) == [("a", 2), ("b", 3)] and runner.fetch_hostfile(str(tmp_path / "none")) is None
    everything = runner.parse_inclusion_exclusion(hosts, "", "")
    assert everything == {"a": [0, 1], "b": [0, 1, 2]}
    assert runner.parse_inclusion_exclusion(hosts, "b:2,0@b:0", "") == {"b": [0, 2]}
    assert runner.parse_inclusion_exclusion(hosts, "", "a@b:1") == {"b": [0, 2]}
    assert runner.apply_num_nodes_and_gpus(everything, 1, -1) == {"a": [0, 1]}
    assert runner.apply_num_nodes_and_gpus(everything, -1, 1) == {"a": [0], "b": [0]}
    assert json.loads(__import__("base64").urlsafe_b64decode(runner.encode_world_info(everything))) == everything
    assert constants.PDSH_LAUNCHER == "pdsh" and runner.PDSH_MAX_FAN_OUT == 1024
    for lines, text in (
        (["a slots=1", "a slots=2"], "twice"),
        (["a b slots=1"], "expected 'host slots=N'"),
        ([""], "no host"),
    ):
        with pytest.raises(ValueError, match=text):
            runner._parse_hostfile(lines)
    for include, exclude, text in (("a", "b", "exclusive"), ("c", "", "not in the hostfile"), ("", "a:7", "no slot 7")):
        with pytest.raises(ValueError, match=text):
            runner.parse_resource_filter(everything, include, exclude)


def test_small_functions_of_sequences_files_and_sections(tmp_path):
    interface()
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.config import get_communication_data_type
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.sequence.layer import apply_rotary_pos_emb
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files
    from pydantic import Field, ValidationError

    angle = torch.tensor(0.3)
    turned = apply_rotary_pos_emb(torch.tensor([[1.0, 2.0, 5.0]]), angle.cos().repeat(2), angle.sin().repeat(2))
    expected = [[angle.cos() - 2 * angle.sin(), 2 * angle.cos() + angle.sin(), 5.0]]
    torch.testing.assert_close(turned, torch.tensor(expected))

    for number in (10, 2, 1):
        (tmp_path / f"zero_{number}_optim_states.pt").touch()
    assert [os.path.basename(path)[5:7].strip("_") for path in get_optim_files(tmp_path)] == ["1", "2", "10"]
    with pytest.raises(FileNotFoundError, match="mp_rank_00_model_states"):
        get_model_state_file(tmp_path, 3)

    monitors = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}})
    MonitorMaster(monitors).write_events([("Train/loss", 2.0, 8)])
    assert (tmp_path / "a" / "Train_loss.csv").read_text() == "step,loss\n8,2.0\n" and monitors.wandb.team is None
    assert get_communication_data_type({"communication_data_type": "BF16"}) is torch.bfloat16

    class Section(DeepSpeedConfigModel):
        new: int = 0
        old: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda x: x + 1})

    assert Section(old=2).new == 3 and Section(new="auto").new == 0
    with pytest.raises(ValidationError):
        Section(other=1)
    with pytest.raises(AssertionError, match="got old and new"):
        Section(old=1, new=1)
    with pytest.raises(ValidationError, match="expected an integer above 0"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)
    assert DeepSpeedFP16Config(loss_scale=8, enabled=True, loss_scale_window=0).loss_scale_window == 0


def test_a_section_without_a_switch_is_on_where_one_within_is():
    from deeptide.as_deepspeed.config.configuration import translate

    batching = {"dynamic_batching": {"enabled": True, "max_tokens": 8}}
    read, lines = translate({"train_batch_size": 1, "data_efficiency": {"data_sampling": batching}})
    assert read["data_efficiency"]["enabled"] and read["data_efficiency"]["data_sampling"]["enabled"]
    assert [line.split(":")[0] for line in lines] == [
        "data_efficiency.enabled",
        "data_efficiency.data_sampling.enabled",
    ]
    off = {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": False, **batching}}}
    assert translate(off) == (off, [])
