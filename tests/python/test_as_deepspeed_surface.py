# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What scripts ask of the interface beside training: older spellings, accessors, helpers that they import."""

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
