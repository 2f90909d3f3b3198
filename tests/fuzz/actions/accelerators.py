# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The simulated accelerator that a program's engines run on; its ranks import it before they use torch's devices.

A program's "accelerator" is None or {"schedule": when tasks run, "delay_us": how late at most, "connections": queues
that all streams share, or 0, "kernels": whether the kernels for GPUs step and sum}.
"""

import contextlib
import gc

import torch
import torch.distributed as dist
from torch import nn

from actions.acts import is_raw

DEVICE = "sim"
SHARE = 0.2  # of programs
SCHEDULES = ("random", "late", "late_default", "late_others")
PATIENCE_MS = 20  # a host waits for other ranks, which wait for what this one's device holds back


def drawn(choose, together):
    """A program's. together: its ranks issue collectives in one order, which queues that streams share ask for."""
    return {
        "schedule": choose(SCHEDULES),
        "delay_us": choose([0, 50, 300]),
        "connections": choose([0, 0, 1, 2]) if together else 0,
        "kernels": choose([False, True]),
    }


def lacks(act):
    """Whether it is about memory that numpy or another process reads, a process's limits, a CPU's generator, or .data.

    CUDA's parameters may get other .data, those of a device from outside torch may not.
    """
    return is_raw(act) or act["act"] in ("fork", "squeeze", "idle", "swap") or act.get("way") == "init"


class Accelerator:
    """A rank's own."""

    def __init__(self, spec, seed):
        import simulated  # torch has an accelerator from here on

        self._controls = simulated
        how = {"max_delay_us": spec["delay_us"], "seed": seed, "connections": spec["connections"]}
        simulated.configure(spec["schedule"], **how, kernels=spec["kernels"], patience=PATIENCE_MS)

    @contextlib.contextmanager
    def group(self, store, number, size):
        """The default group, of which `initialize` makes those of the device."""
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def used_bytes(self):
        """After all that is under way, and without garbage."""
        self.settle()
        gc.collect()
        return self._controls.used_bytes()

    def settle(self):
        """Waits for all tasks. Returns the accesses that nothing orders; empty: none."""
        return self._controls.settle()

    def move(self, model):
        """Moves it there. One parameter stays one, and those share memory that did.

        Module.to does so for the devices that torch knows.
        """
        memory, moved = {}, {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(_moved(parameter.detach(), memory), parameter.requires_grad)
                module._parameters[name] = moved[parameter]
            module._buffers.update({name: b if b is None else b.to(DEVICE) for name, b in module._buffers.items()})
        return model


def _moved(value, memory):
    if not value.numel():
        return value.to(DEVICE)
    storage = value.untyped_storage()
    flat = torch.empty(0, dtype=value.dtype).set_(storage)
    there = memory.setdefault(storage.data_ptr(), flat.to(DEVICE))
    return there.as_strided(value.shape, value.stride(), value.storage_offset())
