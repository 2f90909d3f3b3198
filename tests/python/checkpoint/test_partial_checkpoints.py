# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without the frozen base of a model, and loads that take what is there."""

import json
import shutil

import models
import pytest
import torch
from conftest import run_ranks
from states import assert_same, snapshot, start, train

import deeptide

FROZEN = ("embed.", "h.0.", "h.1.up.")


def adapter_model(seed=0, base=0):
    """A model of which most is frozen: its base by one seed, the trained rest by another."""
    model, frozen = models.make_model(seed), models.make_model(base).state_dict()
    for name, parameter in model.named_parameters():
        if name.startswith(FROZEN):
            parameter.requires_grad_(False).copy_(frozen[name])
    return model


def names_in(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    return {tensor["name"] for tensor in manifest["tensors"]}


def frozen_of(engine):
    state = engine.module_state_dict()
    return {name: value for name, value in state.items() if name.startswith((*FROZEN, "head."))}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_without_frozen_parameters_resumes_over_the_base(stage, world_size, tmp_path, capfd):
    def program(world):
        engine = start(world, stage, adapter_model())
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = snapshot(engine)
        train(engine, 2, 4)
        again = start(world, stage, adapter_model(seed=5))
        train(again)
        again.load_checkpoint(tmp_path)
        assert_same(saved, snapshot(again))
        train(again, 2, 4)
        assert_same(snapshot(engine), snapshot(again))
        other_base = start(world, stage, adapter_model(seed=5, base=7))
        before = frozen_of(other_base)
        other_base.load_checkpoint(tmp_path)
        now = other_base.module_state_dict()
        assert all(torch.equal(now[name], value) for name, value in before.items())
        assert all(torch.equal(value, saved[0][name]) for name, value in now.items() if name not in before)
        engine.save_checkpoint(tmp_path, tag="whole")

    run_ranks(world_size, program)
    left = {name for name in names_in(tmp_path / "whole") if name.startswith(FROZEN)}
    assert len(left) == 1 + 6 + 2
    assert names_in(tmp_path / "global_step2") == names_in(tmp_path / "whole") - left
    assert f"{len(left)} frozen parameters stay as they are" in capfd.readouterr().err


def test_a_base_that_was_written_after_initialize_stays_under_adapters(tmp_path):
    def program(world):
        engine = start(world, 3, adapter_model())
        train(engine)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        again = start(world, 3, adapter_model(seed=5, base=7))
        with torch.no_grad():
            for name, parameter in again.module.named_parameters():
                parameter.copy_(models.make_model().get_parameter(name))
        again.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), snapshot(again))

    run_ranks(2, program)


def test_what_was_frozen_and_is_trained_now_must_be_in_a_checkpoint(tmp_path):
    def program(world):
        engine = start(world, 2, adapter_model())
        train(engine)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        whole = start(world, 2)
        before = snapshot(whole)
        with pytest.raises(deeptide.CheckpointError, match=r"missing in the checkpoint: 'h\.0\.down\.bias"):
            whole.load_checkpoint(tmp_path)
        assert_same(before, snapshot(whole))
        whole.load_checkpoint(tmp_path, load_module_strict=False)
        train(whole, 1, 2)

    run_ranks(2, program)


def test_ranks_that_disagree_on_leaving_out_are_told(tmp_path):
    def program(world):
        engine = start(world, 2, adapter_model())
        with pytest.raises(ValueError, match="some ranks were given exclude_frozen_parameters=true and some false"):
            engine.save_checkpoint(tmp_path, exclude_frozen_parameters=world.rank == 1)

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("layers", "told"), [(4, "missing in the checkpoint, stays"), (2, "unexpected in the")])
def test_a_load_that_is_not_strict_takes_what_is_there_and_lists_what_is_not(stage, layers, told, tmp_path, capfd):
    def program(world):
        engine = start(world, stage)
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)[0]
        other = start(world, stage, models.make_model(7, layers=layers))
        train(other)
        before = snapshot(other)[0]
        other.load_checkpoint(tmp_path, load_module_strict=False)
        for name, value in snapshot(other)[0].items():
            expected = saved.get(name, before[name])
            assert (value is None and expected is None) or torch.equal(value, expected), name
        assert other.global_steps == 2
        train(other, 2, 4)

    run_ranks(2, program)
    error = capfd.readouterr().err
    line = next(line for line in error.splitlines() if told in line)
    assert f"'h.{layers if layers == 2 else 3}." in line


def test_a_weight_without_states_begins_with_new_ones(tmp_path):
    """Bit for bit as an engine that begins there: its step counts from one, beside others that have trained."""

    def program(world):
        frozen = start(world, 0, adapter_model())
        train(frozen, 0, 2)
        frozen.save_checkpoint(tmp_path)
        unfrozen = start(world, 0, models.make_model(3))
        train(unfrozen)
        unfrozen.load_checkpoint(tmp_path, load_module_strict=False)
        masters = snapshot(unfrozen)[0]
        assert not masters["h.0.up.weight/exp_avg"].any() and masters["h.2.up.weight/exp_avg"].any()
        frozen.module.requires_grad_(True)
        frozen.rebuild()
        train(frozen, 2, 4)
        train(unfrozen, 2, 4)
        assert_same(snapshot(frozen), snapshot(unfrozen))

    run_ranks(2, program)


def files_of(folder):
    """By name: (inode, bytes)."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_size) for name, status in found.items()}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_frozen_base_is_stored_once_per_folder(stage, world_size, blocking, tmp_path):
    def wide_model(seed=0):
        model = models.make_model(seed, width=200)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN))
        return model

    def program(world):
        engine = start(world, stage, wide_model(), checkpoint={"keep_last": 1})
        states = {}
        for step, tag in enumerate(("one", "two", "three")):
            train(engine, step, step + 1)
            if tag == "three":
                with torch.no_grad():
                    engine.module.get_parameter("h.1.up.weight").mul_(2)
            states[tag] = snapshot(engine)
            engine.save_checkpoint(tmp_path, tag=tag, blocking=blocking)
            engine.wait_for_save()
        for tag, state in states.items():
            again = start(world, 3 - stage, wide_model(seed=5))
            again.load_checkpoint(tmp_path, tag=tag)
            assert_same(state, snapshot(again))

    run_ranks(world_size, program)
    one, two, three = (files_of(tmp_path / tag) for tag in ("one", "two", "three"))
    shared = {name for name in one if name.startswith("frozen_")}
    assert len(shared) >= 3 and sum(one[name][1] for name in shared) > 1_400_000
    assert {name: one[name] for name in shared} == {name: two[name] for name in two if name.startswith("frozen_")}
    changed = {name for name in three if name.startswith("frozen_")} - shared
    assert 1 <= len(changed) <= world_size
    assert all(two[name] == three[name] for name in shared & three.keys())
    shutil.rmtree(tmp_path / "one")
    assert not deeptide.checkpoint.verify(tmp_path, tag="two")


@pytest.mark.parametrize("by", ["call", "configuration"])
@pytest.mark.parametrize("contents", ["trainable", "weights"])
def test_a_checkpoint_holds_what_its_policy_says(contents, by, tmp_path):
    def program(world):
        extra = {"checkpoint": {"contents": contents}} if by == "configuration" else {}
        engine = start(world, 2, adapter_model(), **extra)
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, **({"contents": contents} if by == "call" else {}))
        engine.save_checkpoint(tmp_path, tag="all", save_latest=False, contents="all")
        again = start(world, 3, adapter_model(seed=5))
        before = snapshot(again)
        if contents == "weights":
            with pytest.raises(deeptide.CheckpointError, match=r"(?s)weights.*load_optimizer_states=False"):
                again.load_checkpoint(tmp_path)
            assert_same(before, snapshot(again))
            again.load_checkpoint(tmp_path, load_optimizer_states=False)
            now, saved = snapshot(again)[0], snapshot(engine)[0]
            for name, value in saved.items():
                expected = before[0][name] if name.endswith(("exp_avg", "exp_avg_sq")) else value
                assert (expected is None and now[name] is None) or torch.equal(expected, now[name]), name
        else:
            again.load_checkpoint(tmp_path)
            assert_same(snapshot(engine), snapshot(again))
        if world.rank == 0:
            with pytest.raises(deeptide.ConfigError, match="contents is 'moments', expected one of all, trainable"):
                engine.save_checkpoint(tmp_path, contents="moments")

    run_ranks(2, program)
    reader, whole = deeptide.checkpoint.open(tmp_path), deeptide.checkpoint.open(tmp_path, tag="all")
    held = {(tensor.name, tensor.role) for tensor in reader.tensors}
    left_out = {(tensor.name, tensor.role) for tensor in whole.tensors} - held
    if contents == "weights":
        assert left_out and all(role in ("exp_avg", "exp_avg_sq") for _, role in left_out)
        assert {role for _, role in held} == {"master", "param"}
    else:
        assert left_out and all(name.startswith(FROZEN) and role == "param" for name, role in left_out)


def test_other_shapes_are_an_error_of_every_load(tmp_path):
    def program(world):
        engine = start(world)
        engine.save_checkpoint(tmp_path)
        wider = start(world, 0, models.make_model(width=22))
        with pytest.raises(deeptide.CheckpointError, match="expected \\(37, 22\\)"):
            wider.load_checkpoint(tmp_path, load_module_strict=False)

    run_ranks(1, program)
