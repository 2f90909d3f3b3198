# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The accelerator that tests run on: the simulated one, or with DEEPTIDE_TEST_ACCELERATOR=cuda a GPU (`make test-gpu`).

Import nothing of torch's devices at the top of a test's module: ranks are forked from a process that has used none.
"""

import os
import types
import warnings

import models
import pytest
import torch
import torch.distributed as dist

import deeptide

DEVICE = os.environ.get("DEEPTIDE_TEST_ACCELERATOR", "sim")
ON_GPU = DEVICE != "sim"

# Only the simulated one has these: schedules that show a missing wait, caps, bandwidths, a count of streams.
simulated_only = pytest.mark.skipif(ON_GPU, reason="needs what only the simulated accelerator measures")


class HostWaits:
    """The calls in which the host waited for the GPU, by torch's own watch over its synchronizing operators."""

    def __init__(self):
        self._caught = warnings.catch_warnings(record=True)
        self._seen = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def __call__(self):
        waits = [str(seen.message) for seen in self._seen if "synchronizing" in str(seen.message)]
        self._seen.clear()
        return waits


def _on_gpu():
    """The simulated accelerator's controls, as far as a GPU has them: order is not checked, only waited for."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if dist.get_world_size() > torch.cuda.device_count():
        dist.Backend.default_device_backend_map["cuda"] = "gloo"  # NCCL refuses two ranks on one GPU
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # an embedding's gradients are added in any order else

    def settle():
        torch.cuda.synchronize()
        return ""

    return types.SimpleNamespace(
        configure=lambda *_, **__: None,
        settle=settle,
        used_bytes=torch.cuda.memory_allocated,
        events=lambda: 0,
        streams=lambda: 0,
        host_waits=HostWaits(),
    )


def begin():
    """Begins a rank, as one that shares no memory with the others, and returns the accelerator's controls."""
    os.environ["DEEPTIDE_TEST_APART"] = "1"
    torch.set_num_threads(1)
    if not ON_GPU:
        import simulated as controls
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return _on_gpu() if ON_GPU else controls


def warm_up(engine, train):
    """Trains and ends an engine before bytes are counted: libraries' workspaces are then there, for each thread."""
    train(engine, DEVICE)
    torch.accelerator.synchronize()
    engine.destroy()


def assert_bytes_as_planned(engine, model, config, why=None, but=()):
    """Measured bytes of every role are the forecast, to 2 %, and what is planned for such a model. Returns the plan.

    `but`: a role that is left out.
    """
    planned = deeptide.plan(models.to_device(model, DEVICE), config, world_size=dist.get_world_size())
    for line in engine.memory():
        if line.role in but:
            continue
        assert line.measured_bytes == pytest.approx(line.predicted_bytes, rel=0.02), (why, line)
        assert line.measured_off_device_bytes == line.off_device_bytes, (why, line)
        assert planned.lines[line.role].memory_bytes == line.predicted_bytes, (why, line)
        assert planned.lines[line.role].off_device_bytes == line.off_device_bytes, (why, line)
    return planned
