# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""deepspeed.checkpointing: buffers of kept arguments, waits at the boundaries, and times."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deeptide._process.log import DeeptideWarning
from deeptide.as_deepspeed.training import boundaries, checkpointing

LAYERS, STEPS = 3, 3
_OFF = {"contiguous_checkpointing": False, "checkpoint_in_cpu": False, "synchronize": False, "profile": False}


@pytest.fixture(autouse=True)
def restored():
    yield
    checkpointing.configure(**_OFF)
    checkpointing.reset()


@pytest.fixture(params=["checkpoint", "non_reentrant_checkpoint"])
def run(request):
    return getattr(checkpointing, request.param)


def train(run, layers=LAYERS):
    """(losses, buffers and rows in use after each forward and each backward)."""
    torch.manual_seed(2)
    blocks = [nn.Linear(8, 8) for _ in range(layers)]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    losses, seen = [], []
    for step in range(STEPS):
        hidden = torch.full((4, 8), 0.1 * step + 0.1, requires_grad=True)
        mask = torch.arange(4) > 1
        for block in blocks:
            hidden = run(lambda x, m, block=block: F.gelu(block(x)) * m.unsqueeze(-1) + x, hidden, mask)
        loss = hidden.square().mean()
        seen.append(rows_in_use())
        loss.backward()
        seen.append(rows_in_use())
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1 * weight.grad
                weight.grad = None
        losses.append(loss.item())
    return losses, seen


def rows_in_use():
    """By buffer: (address, rows, rows in use)."""
    rows = checkpointing._rows
    if rows is None:
        return []
    return [(buffer.data_ptr(), len(buffer), len(buffer) - len(free)) for buffer, free in rows.buffers.values()]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_arguments_lie_in_one_buffer_that_every_step_uses_again(run, on_cpu):
    expected, none = train(run)
    assert set(map(len, none)) == {0}
    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=LAYERS, checkpoint_in_cpu=on_cpu)
    losses, seen = train(run)
    assert losses == expected
    assert [[used for _, _, used in each] for each in seen] == [[LAYERS], [0]] * STEPS
    assert len({(address, rows) for each in seen for address, rows, _ in each}) == 1
    checkpointing.reset()
    assert rows_in_use() == []


def test_more_checkpoints_than_rows_are_told_and_kept_by_themselves(run):
    expected, _ = train(run)
    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=LAYERS - 1)
    with pytest.warns(DeeptideWarning, match="more than num_checkpoints, 2, keep their arguments at once") as told:
        losses, seen = train(run)
    assert losses == expected and len(told) == 1
    assert [used for (_, _, used), *_ in seen] == [LAYERS - 1, 0] * STEPS


def test_a_section_of_the_configuration_says_the_same():
    section = {"contiguous_memory_optimization": True, "number_checkpoints": LAYERS}
    checkpointing.configure(deepspeed_config={"train_batch_size": 1, "activation_checkpointing": section})
    _, seen = train(checkpointing.checkpoint)
    assert [rows for _, rows, _ in seen[0]] == [LAYERS]
    checkpointing.set_num_layers(LAYERS + 2)
    assert [rows for _, rows, _ in train(checkpointing.checkpoint)[1][0]] == [LAYERS + 2]


def test_arguments_by_keyword_get_gradients_too():
    value, scale = (torch.randn(4, requires_grad=True) for _ in range(2))

    def of_names(x, *, scale, offset):
        return (x * scale + offset).square()

    checkpointing.checkpoint(of_names, value, scale=scale, offset=1.5).sum().backward()
    expected = 2 * (value * scale + 1.5).detach()
    torch.testing.assert_close(value.grad, expected * scale.detach())
    torch.testing.assert_close(scale.grad, expected * value.detach())


def test_contiguous_checkpointing_needs_a_number():
    checkpointing.set_num_layers(0)
    with pytest.raises(ValueError, match="contiguous_checkpointing needs num_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True)
    assert train(checkpointing.checkpoint, 1)[1][0] == []


def lines(caplog):
    return re.findall(r"time \(ms\) \| (\w+): \d+\.\d\d", "\n".join(record.message for record in caplog.records))


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_profile_logs_the_time_of_each_forward_and_backward(run, needs_gradient, caplog):
    caplog.set_level(logging.INFO, "deeptide")
    checkpointing.configure(profile=True)
    block, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=needs_gradient)
    if run is checkpointing.checkpoint and not needs_gradient:
        x = x.clone().requires_grad_()  # a reentrant one needs it
    for _ in range(2):
        out = run(lambda x: (block(x), x * 2), x)
        assert lines(caplog)[-1] == "fwd"
        (out[0].sum() + out[1].sum()).backward()
        assert lines(caplog)[-1] == "backward"
    assert lines(caplog) == ["fwd", "backward"] * 2
    checkpointing.configure(profile=False)
    run(block, x).sum().backward()
    assert len(lines(caplog)) == 4


def test_boundaries_wait_for_the_device(run, monkeypatch):
    events = []

    class Device:
        @staticmethod
        def synchronize():
            events.append("waits")

    monkeypatch.setattr(boundaries, "get_accelerator", Device)
    checkpointing.configure(synchronize=True)

    def block(x):
        events.append("runs")
        return x.square()

    out = run(block, torch.ones(2, requires_grad=True))
    assert events == ["waits", "runs", "waits"]
    out.sum().backward()
    assert events == ["waits", "runs", "waits"] * 2
