# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Activations on an accelerator: what blocks keep goes to the host or to files and back, or is computed again."""

import models
import pytest
import torch
from accelerated import DEVICE, begin
from conftest import run_processes

import deeptide

STEPS, MICRO, LENGTH = 3, 2, 64


def train(activations, stage, bf16):
    model = models.to_device(models.make_model(), DEVICE)
    config = models.config(stage, micro=MICRO, gas=2, bf16=bf16)
    config |= {"activation_checkpointing": activations} if activations else {}
    engine = deeptide.initialize(model=model, config=config)[0]
    rank, found = torch.distributed.get_rank(), []
    for step in range(STEPS):
        for micro in range(2):
            tokens, targets = models.batches(1, MICRO, length=LENGTH, seed=100 * step + 10 * micro + rank)[0]
            loss = engine(tokens.to(DEVICE), targets.to(DEVICE))
            engine.backward(loss)
            found.append(loss.detach().cpu())
            engine.step()
    found += [engine._core.full_state(name, "master").cpu() for name, _ in model.named_parameters()]
    choice = engine.activation_checkpointing()
    engine.destroy()
    return found, choice


def compare(stage, bf16, memory, folder):
    controls = begin()
    controls.configure("random")
    wanted, nothing = train(None, stage, bf16)
    assert nothing is None
    in_files = {"policy": "files", "nvme_path": folder}
    for activations in ({"policy": "host"}, in_files, {"policy": "recompute"}, {"policy": "auto", "memory": memory}):
        found, choice = train(activations, stage, bf16)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), activations
        assert choice.blocks == ["h.0", "h.1", "h.2"] and not choice.is_pending
        if choice.policy in ("host", "files"):
            width, rows = 20, MICRO * LENGTH
            least = 3 * rows * (2 * width + 2 * 3 * width) * (2 if bf16 else 4)  # of each block's products and norm
            assert least <= choice.host_bytes + choice.file_bytes <= 1.6 * least
            assert (choice.host_bytes == 0) == (choice.policy == "files")
        elif choice.policy == "auto":
            assert 0 < len(choice.recomputed) < 3 and choice.predicted_bytes <= choice.budget_bytes
    assert controls.settle() == ""


@pytest.mark.costly
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, False), (3, True)])
def test_no_policy_changes_a_bit(stage, bf16, tmp_path):
    run_processes(2, compare, stage, bf16, "105KiB" if bf16 else "210KiB", str(tmp_path))
