# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Asks of the interface what DeepSpeed's own unit tests ask: contexts of the engine, the optimizer's inside."""

import contextlib
import math
import os

import models
import pytest
import torch
from conftest import run_processes
from test_as_deepspeed_engine import interface, start, train

import deeptide


def check_coalesced(stage):
    """All backwards of a step inside the context: the losses after it are those without it, and misuses are errors."""
    _, plain, *_ = start(stage, gas=2)
    _, engine, *_ = start(stage, gas=2)
    losses = ([], [])
    for step in range(3):
        tokens, targets = models.batches(step + 1, 8)[step]
        for each, found in zip((plain, engine), losses):
            context = each.coalesce_grad_reduction() if each is engine else contextlib.nullcontext()
            with context:
                for half in range(2):
                    rows = slice(4 * each.global_rank + 2 * half, 4 * each.global_rank + 2 * half + 2)
                    each.set_gradient_accumulation_boundary(half == 1)
                    loss = each(tokens[rows], targets[rows])
                    each.backward(loss)
                    found.append(float(loss.detach()))
                if each is engine:
                    assert each.inside_no_sync_ctxt
                    for misuse in (each.step, each.no_sync().__enter__, each.coalesce_grad_reduction().__enter__):
                        with pytest.raises(AssertionError, match=r"no_sync|ZeRO stage"):
                            misuse()
            each.step()
    assert losses[0] == losses[1] and engine.global_steps == plain.global_steps == 3
    assert not engine.inside_no_sync_ctxt


@pytest.mark.parametrize("stage", [1, 3])
def test_coalesced_reductions_change_no_number(stage):
    run_processes(2, check_coalesced, stage)


def check_coalescing_needs_a_stage():
    _, engine, *_ = start(0)
    with pytest.raises(NotImplementedError, match="at ZeRO stage 0"), engine.coalesce_grad_reduction():
        pass


def test_coalescing_is_refused_at_stage_0():
    run_processes(1, check_coalescing_needs_a_stage)


def check_masters(stage, name):
    _, engine, optimizer, _ = start(stage)
    train(engine)
    (flat,) = getattr(optimizer, name)
    whole = [deeptide.utils.safe_get_full_fp32_param(each) for each in optimizer.bit16_groups[0]]
    squares = flat.pow(2).sum()
    assert type(flat + 1) is type(flat.clone()) is torch.Tensor
    torch.distributed.all_reduce(squares)
    assert math.isclose(float(squares), sum(float(each.pow(2).sum()) for each in whole), rel_tol=1e-5)
    before = flat.clone()
    writes = (flat.zero_, lambda: flat.data.copy_(flat), lambda: flat[:1].fill_(0), lambda: torch.add(1, 1, out=flat))
    for write in writes:
        with pytest.raises(NotImplementedError, match="safe_set_full_fp32_param"):
            write()
    with pytest.raises(NotImplementedError, match="safe_set_full_fp32_param"):
        flat += 1
    with pytest.raises(NotImplementedError, match="safe_set_full_fp32_param"):
        flat[0:1] = 0
    assert torch.equal(before, flat)
    with pytest.raises(AttributeError):
        _ = optimizer.fp32_groups_flat  # of fp16 without ZeRO


@pytest.mark.parametrize(
    ("stage", "name"), [(1, "single_partition_of_fp32_groups"), (3, "fp32_partitioned_groups_flat")]
)
def test_flat_masters_are_copies_to_read(stage, name):
    run_processes(2, check_masters, stage, name)


def check_exports(folder):
    deepspeed, engine, *_ = start(2)
    engine.save_checkpoint(folder)
    torch.distributed.barrier()
    for _ in range(5):
        deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, os.path.join(folder, "out"))
    torch.distributed.barrier()
    state = torch.load(os.path.join(folder, "out", "pytorch_model.bin"))
    for name, value in deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder).items():
        assert torch.equal(state[name], value), name
    assert os.access(os.path.join(folder, "zero_to_fp32.py"), os.X_OK)


def test_all_ranks_may_convert_into_one_folder(tmp_path):
    run_processes(2, check_exports, str(tmp_path))
    assert os.listdir(tmp_path / "out") == ["pytorch_model.bin"]


def check_gradients_of_ranks(stage):
    """Each rank gives its own number: the step takes of each what it holds; at stage 0 that is an error."""
    deepspeed, engine, *_ = start(stage)
    tokens, targets = models.batches(1, 8)[0]
    engine.backward(engine(tokens[:2], targets[:2]))
    parameters = list(engine.module.parameters())
    mine = float(engine.global_rank + 1)
    if stage == 0:
        with pytest.raises(ValueError, match="differs between ranks"):
            deepspeed.utils.safe_set_full_grad(parameters[0], torch.full_like(parameters[0], mine))
        return
    for parameter in parameters:
        deepspeed.utils.safe_set_full_grad(parameter, torch.full_like(parameter, mine))
    for parameter in parameters:
        part = deepspeed.utils.safe_get_local_grad(parameter)
        assert part is None or bool((part == mine).all())
    held = {float(each) for each in torch.cat([deepspeed.utils.safe_get_full_grad(p).flatten() for p in parameters])}
    assert held == {1.0, 2.0}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_rank_sets_the_gradients_that_it_holds(stage):
    run_processes(2, check_gradients_of_ranks, stage)


def test_batch_sizes_of_a_configuration_are_worked_out_again(monkeypatch):
    configuration = interface().DeepSpeedConfig({"train_batch_size": 4})
    monkeypatch.setenv("WORLD_SIZE", "2")
    configuration.train_batch_size, configuration.train_micro_batch_size_per_gpu = 32, 8
    configuration.gradient_accumulation_steps = None
    configuration._configure_train_batch_size()
    assert configuration.gradient_accumulation_steps == 2
    configuration.train_batch_size = 33
    with pytest.raises(AssertionError, match="33"):
        configuration._configure_train_batch_size()


def test_a_configuration_may_be_hjson(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / "config.json"
    path.write_text("{\n  train_batch_size: 4\n  // a comment\n  optimizer: {type: Adam\n params: {lr: 0.5}}\n}")
    interface()
    from deepspeed import DeepSpeedConfig

    configuration = DeepSpeedConfig(str(path))
    assert configuration.train_batch_size == 4 and configuration.optimizer_params == {"lr": 0.5}


def test_one_and_zero_are_true_and_false():
    interface()
    from deeptide.as_deepspeed.config.configuration import translate

    zero = {"stage": 1, "overlap_comm": 0}
    given = {"zero_allow_untested_optimizer": 1, "steps_per_print": 1, "zero_optimization": zero}
    read, lines = translate(given)
    assert read["zero_allow_untested_optimizer"] is True and read["zero_optimization"]["overlap_comm"] is False
    assert type(read["steps_per_print"]) is type(read["zero_optimization"]["stage"]) is int
    assert lines == [
        "zero_allow_untested_optimizer: 1 taken as true",
        "zero_optimization.overlap_comm: 0 taken as false",
    ]


def check_tags(folder):
    _, engine, *_ = start(0, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(AssertionError, match="the ranks give tag-0, tag-1; give one tag"):
        engine.save_checkpoint(folder, tag=f"tag-{engine.global_rank}")
    engine.save_checkpoint(folder, tag="same")


def test_tags_that_differ_are_an_assertion_where_the_configuration_asks(tmp_path):
    run_processes(2, check_tags, str(tmp_path))


def test_batch_sizes_beside_elasticity_are_its_error():
    interface()
    from deepspeed import DeepSpeedConfig
    from deepspeed.elasticity.config import ElasticityError

    section = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "version": 0.1}
    with pytest.raises(ElasticityError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": 2, "elasticity": section})


def test_options_that_do_not_fit_are_a_value_error(capfd):
    interface()
    from deepspeed.launcher import runner

    with pytest.raises(ValueError, match="2"):
        runner.main(["--num_nodes", "1", "-i", "localhost", "foo.py"])
    assert "include" in capfd.readouterr().err


def check_shared_loss():
    """One loss of two engines, and the call that ends its backward: both take the steps that their own losses give."""
    shared = [start(2)[1] for _ in range(2)]
    alone = start(2)[1]
    for step in range(2):
        tokens, targets = models.batches(step + 1, 8)[step]
        rows = slice(2 * alone.global_rank, 2 * alone.global_rank + 2)
        sum(engine.module(tokens[rows], targets[rows]) for engine in shared).backward()
        for engine in shared:
            engine._backward_epilogue()
            engine.step()
        alone.backward(alone(tokens[rows], targets[rows]))
        alone.step()
    for engine in shared:
        assert all(map(torch.equal, engine.module.parameters(), alone.module.parameters()))


def test_engines_may_share_a_loss():
    run_processes(2, check_shared_loss)
