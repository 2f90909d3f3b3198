# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The launch arguments of the tuning tutorials, and the schedule that they ask for."""

import argparse

import models
import pytest

import deeptide
from deeptide._process.arguments import get_config_from_args, get_lr_from_config, scheduler_of


def parse(*arguments):
    return deeptide.add_tuning_arguments(argparse.ArgumentParser()).parse_args(arguments)


def rates(section, steps=3):
    engine = deeptide.initialize(model=models.make_model(), config=models.config(0, scheduler=section))[0]
    seen = []
    for tokens, targets in models.batches(steps, 4):
        engine.backward(engine(tokens, targets))
        engine.step()
        seen += engine.get_lr()
    return seen


def test_without_a_schedule_there_is_no_section():
    args = parse()
    assert scheduler_of(args) is None
    assert get_config_from_args(args) == (None, "--lr_schedule is not given")


def test_a_range_test_is_the_configurations():
    args = parse(
        *("--lr_schedule", "LRRangeTest", "--lr_range_test_min_lr", "0.01", "--lr_range_test_step_size", "1"),
        *("--lr_range_test_step_rate", "2", "--lr_range_test_staircase", "true"),
    )
    section, error = get_config_from_args(args)
    assert error is None
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_rate": 2.0, "lr_range_test_step_size": 1}
    assert section == {"type": "LRRangeTest", "params": {**params, "lr_range_test_staircase": True}}
    assert rates(section) == pytest.approx([0.03, 0.05, 0.07])
    assert get_lr_from_config(section) == (0.01, "")


def test_a_cycle_and_a_warm_up_are_accepted_with_the_defaults():
    section = scheduler_of(parse("--lr_schedule", "OneCycle", "--cycle_first_step_size", "2"))
    assert "cycle_second_step_size" not in section["params"]
    assert rates(section) == pytest.approx([0.055, 0.1, 0.055])
    assert get_lr_from_config(section) == (0.1, "")
    section = scheduler_of(parse("--lr_schedule", "WarmupLR", "--warmup_num_steps", "4", "--warmup_type", "linear"))
    assert rates(section) == pytest.approx([0.0, 0.00025, 0.0005])


def test_another_schedule_is_named():
    args = parse("--lr_schedule", "Cosine")
    with pytest.raises(deeptide.ConfigError, match="--lr_schedule: got 'Cosine', expected one of LRRangeTest"):
        scheduler_of(args)
    assert get_config_from_args(args)[0] is None
    assert get_lr_from_config({"type": "Cosine", "params": {}})[0] is None
