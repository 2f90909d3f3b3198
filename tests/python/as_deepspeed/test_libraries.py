# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers' Trainer and a loop of Accelerate's, through the interface and under DDP; tests/peers has the rest."""

import libraries
import pytest
import torch
from conftest import run_processes


@pytest.mark.slow
@pytest.mark.parametrize("script", [libraries.run_trainer, libraries.run_accelerate])
def test_a_library_learns_as_under_ddp_when_windows_are_short(script, tmp_path):
    for name, stage in (("plain", None), ("whole", 0), ("sharded", 3)):
        run_processes(2, script, str(tmp_path), name, stage, 3, preload=libraries.PRELOAD)
    plain = libraries.read(tmp_path, "plain")
    for name in ("whole", "sharded"):
        libraries.check_equal(libraries.read(tmp_path, name), plain, 4 if script is libraries.run_trainer else 10)


def count_as_one_rank():
    """Starts as a program with Accelerate's defaults on a CPU, whose state counts one rank."""
    import deepspeed
    from accelerate.state import PartialState

    assert PartialState().num_processes == 1
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    error = deepspeed.runtime.config.DeepSpeedConfigError
    with pytest.raises(error, match=r"Accelerate counts 1 of 2 ranks.*cpu=True"):
        deepspeed.initialize(model=torch.nn.Linear(4, 1), config={**config, "train_batch_size": 4})
    with pytest.warns(UserWarning, match="Accelerate counts 1 of 2 ranks"):
        engine = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)[0]
    engine.destroy()


def test_accelerate_that_counts_other_ranks_is_named():
    run_processes(2, count_as_one_rank, preload=libraries.PRELOAD)
