# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Elastic batches in Python: against a slow model of the rules, and against DeepSpeed's own function where it is."""

import importlib.util
import json
import math
import os
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import run_ranks

import deeptide
from deeptide.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

HIGHLY_COMPOSITE = [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080]


def section(**changes):
    return {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "version": 0.1,
        **changes,
    }


def model(micros, most, low, high, larger=True):
    """Version 0.1 by its definition, slowly: every candidate, every number of ranks."""
    best = (0, 0, 0, [])
    for base in {*micros, math.lcm(*micros)}:
        if base > most:
            continue
        batch = base * max(n for n in HIGHLY_COMPOSITE if n <= most // base)
        valid = [
            world
            for world in range(low, min(high, batch) + 1)
            if any(batch % micro == 0 and (batch // micro) % world == 0 for micro in micros)
        ]
        rank = (len(valid), batch if larger else -batch)
        if valid and rank > best[:2]:
            best = (*rank, batch, valid)
    return best[2], best[3]


def test_known_example_gives_deepspeeds_values():
    config = {
        "elasticity": section(max_train_batch_size=10000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500)
    }
    batch, valid = compute_elastic_config(config)
    assert (batch, len(valid)) == (9792, 23)
    assert compute_elastic_config(config, world_size=64) == (9792, valid, 17)


@pytest.mark.parametrize("seed", range(60))
def test_version_1_equals_the_slow_model(seed):
    random_ = random.Random(seed)
    micros = random_.sample(range(1, 40), random_.randint(1, 5))
    most = random_.randint(max(micros), 5000)
    low, larger = random_.randint(1, 4), bool(seed % 2)
    high = random_.randint(low, 600)
    expected = model(micros, most, low, high, larger)
    if not expected[1]:
        pytest.skip("no number of ranks suits")
    config = {
        "elasticity": section(
            micro_batch_sizes=micros, max_train_batch_size=most, min_gpus=low, max_gpus=high, prefer_larger_batch=larger
        )
    }
    assert compute_elastic_config(config) == expected


def deepspeeds_function():
    """From an unpacked source of a version that still had it, e.g. 0.19.7; without importing the rest of it."""
    root = os.environ.get("DEEPSPEED_SOURCE")
    if not root:
        pytest.skip("DEEPSPEED_SOURCE names no unpacked DeepSpeed up to 0.19.7")
    for name in ("oracle", "oracle.elasticity"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    quiet = types.SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    sys.modules["oracle.utils"] = types.SimpleNamespace(logger=quiet)
    sys.modules["oracle.git_version_info"] = types.SimpleNamespace(version="0.19.7")
    for name in ("constants", "config", "elasticity"):
        path = Path(root) / "deepspeed" / "elasticity" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"oracle.elasticity.{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["oracle.elasticity.elasticity"].compute_elastic_config


def outcome(function, *args):
    try:
        result = function(*args)
    except Exception:
        return "error"
    if result[0] == 0:  # a batch of nothing: an error here
        return "error"
    return tuple(list(map(int, value)) if isinstance(value, list) else value for value in result)


def test_equals_deepspeeds_own_function():
    theirs = deepspeeds_function()
    random_ = random.Random(1)
    counted = 0
    for _ in range(3000):
        nodes = random_.choice([1, 1, 2, 4, 8])
        elastic = section(
            version=random_.choice([0.1, 0.2]),
            micro_batch_sizes=random_.sample(range(1, 33), random_.randint(1, 4)),
            max_train_batch_size=random_.randint(8, 4000),
            min_gpus=random_.randint(1, 8),
            max_gpus=random_.randint(8, 300),
            prefer_larger_batch=random_.random() < 0.5,
            num_gpus_per_node=nodes,
        )
        world = random_.choice([0, random_.randint(1, 64)])
        arguments = ({"elasticity": elastic}, "0.19.7", world, True)
        expected, got = outcome(theirs, *arguments), outcome(compute_elastic_config, *arguments)
        assert got == expected, (elastic, world)
        counted += expected != "error"
    assert counted > 300


def test_errors_have_deepspeeds_types_and_say_what_is_wrong(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert issubclass(ElasticityError, deeptide.ConfigError)
    with pytest.raises(ElasticityConfigError, match="'elasticity' is missing"):
        compute_elastic_config({})
    with pytest.raises(ElasticityConfigError, match="enabled is not true"):
        compute_elastic_config({"elasticity": {"enabled": False}})
    with pytest.raises(ElasticityConfigError, match="micro_batch_sizes: missing"):
        compute_elastic_config({"elasticity": {"enabled": True, "version": 0.1}})
    with pytest.raises(ElasticityConfigError, match="did you mean"):
        compute_elastic_config({"elasticity": section(max_gpu=3)})
    with pytest.raises(ElasticityConfigError, match=r"0\.2 needs the number of ranks"):
        compute_elastic_config({"elasticity": section(version=0.2)})
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config({"elasticity": section()}, return_microbatch=True)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"World size \(7919\)"):
        compute_elastic_config({"elasticity": section()}, world_size=7919)
    with pytest.raises(ElasticityError, match=r"0\.3\.8"):
        compute_elastic_config({"elasticity": section()}, "0.3.7")
    with pytest.raises(ElasticityError, match="expected a version"):
        compute_elastic_config({"elasticity": section()}, "new")
    with pytest.raises(ValueError, match="expected a dict"):
        compute_elastic_config("ds_config.json")


def test_world_size_of_the_environment_counts_where_none_is_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = {"elasticity": section()}
    assert compute_elastic_config(config, return_microbatch=True) == compute_elastic_config(config, world_size=4)


def test_scheduler_and_job_must_have_planned_alike(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section()))
    ensure_immutable_elastic_config(section())
    with pytest.raises(ElasticityConfigError, match="max_train_batch_size: 1000 does not match 2000"):
        ensure_immutable_elastic_config(section(max_train_batch_size=1000))


def test_enabled_is_off_unless_it_is_said():
    assert not elasticity_enabled({})
    assert not elasticity_enabled({"elasticity": {}})
    assert elasticity_enabled({"elasticity": section()})


def test_engine_takes_the_elastic_batch():
    def main(world):
        config = {"elasticity": section(max_train_batch_size=24), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine, *_ = deeptide.initialize(model=torch.nn.Linear(4, 2), config=config, world=world)
        try:
            return engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
        finally:
            engine.destroy()

    batch, _, micro = compute_elastic_config({"elasticity": section(max_train_batch_size=24)}, world_size=2)
    assert run_ranks(2, main) == [(batch, micro)] * 2
