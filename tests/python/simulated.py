# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The simulated accelerator (tests/simulated) as torch's device type "sim".

Import it in processes of their own (`run_processes`): afterwards torch has an accelerator. No fork after its first use.
"""

import itertools
import os
import sys
import types

import torch
import torch.distributed as dist

import deeptide

_LIBRARY = os.path.join(
    os.path.dirname(deeptide.__file__), "..", "..", "tests", "simulated", "libdeeptide_simulated.so"
)
torch.ops.load_library(os.path.abspath(_LIBRARY))
_ops = torch.ops.simulated

SCHEDULES = ("at_once", "random", "late", "late_default", "late_others")

used_bytes, settle, host_waits, host_time_s, tasks, checked, events, streams = (
    _ops.used_bytes,
    _ops.settle,
    _ops.host_waits,
    _ops.host_time_s,
    _ops.tasks,
    _ops.checked,
    _ops.events,
    _ops.streams,
)


def configure(
    schedule="random",
    max_delay_us=0,
    seed=1,
    cap=16 << 30,
    check=True,
    guard_pinned=False,
    compute=0.0,
    to_device=0.0,
    to_host=0.0,
    link=0.0,
    workspace=0,
    warns_of_waits=False,
    stuck="never",
    connections=0,
    pins_for_another=False,
    staged=64 << 10,
    kernels=False,
    patience=0,
):
    """Sets all at once.

    `schedule`: when tasks run. `cap`: bytes. `compute` to `link`: simulated bandwidths in bytes per second, 0:
    unlimited; `compute`: of the memory that operators read and write; `link`: between ranks. `workspace`: bytes that
    matrix products keep for each thread and stream. `warns_of_waits`: by torch's warnings, as CUDA's debug mode.
    `stuck`: which collectives stay on the device until their group is aborted: "never", "without a peer", "always".
    `connections`: queues that all streams share, 0: each has its own. `pins_for_another`: pinned memory is not this
    device's. `staged`: bytes of a copy from memory that is not pinned beyond which it keeps the host. `kernels`: those
    for GPUs are the device's. `patience`: milliseconds for which late tasks are held back though nothing here needs
    them, 0: for ever.
    """
    _ops.configure(
        schedule,
        max_delay_us,
        seed,
        cap,
        check,
        guard_pinned,
        compute,
        to_device,
        to_host,
        link,
        workspace,
        warns_of_waits,
        stuck,
        connections,
        pins_for_another,
        staged,
        kernels,
        patience,
    )


def traffic():
    """By task: how many were issued since the last call, and the bytes that they read and write."""
    return {name: (tasks, bytes) for name, tasks, bytes in _ops.traffic()}


def host_access(tensor, write):
    """Declares that the host accesses pinned memory by a plain pointer."""
    _ops.host_access(tensor, write)


_numbers = itertools.count()
timeouts = []  # of the groups that were made


def _make_backend(store, rank, size, timeout):
    """Device tensors travel as tasks of a stream, by a Gloo group of their own."""
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    timeouts.append(timeout)
    name = f"simulated {next(_numbers)}"
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    _ops.attach_collectives(name)
    return group._get_backend(torch.device("sim"))


def _device_module():
    module = types.ModuleType("torch.sim")
    module.device_count = lambda: 1
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    # Without it torch up to 2.11 takes the device for unused, and synchronize returns at once.
    module._lazy_init = lambda: None
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = _ops.seed
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream, module.Event = torch.Stream, torch.Event
    module.device = lambda device: torch.accelerator.device_index(0)
    module.set_device = lambda device: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=None: torch.empty(0)
    module.set_rng_state = lambda state, device=None: None
    return module


torch.utils.rename_privateuse1_backend("sim")
sys.modules["torch.sim"] = _device_module()
torch._register_device_module("sim", sys.modules["torch.sim"])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("simulated", _make_backend, devices=["sim"])
