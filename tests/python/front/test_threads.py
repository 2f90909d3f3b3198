# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process get along with what torch keeps once for the process."""

import sys
import threading

import torch
from torch._ops import _OpNamespace

import deeptide

NUM_THREADS = 4


def test_ranks_find_operators_made():
    """A lookup that runs Python code lets another thread in, and torch's C++ side asserts that none came."""
    deeptide.make_world(torch.distributed.HashStore(), 0, 2)
    missing = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        found = vars(vars(torch.ops).get(namespace, torch)).get(packet)
        if found is None or (overload or "default") not in vars(found):
            missing.append(full)
    assert missing == []


def test_a_kernel_may_be_registered_before_its_operator():
    library = torch.library.Library("deeptide_test_kernels", "IMPL")
    library.impl("early", torch.clone, "CPU")
    deeptide.make_world(torch.distributed.HashStore(), 0, 2)
    whole = torch.library.Library("deeptide_test_kernels", "FRAGMENT")
    whole.define("early(Tensor x) -> Tensor")
    deeptide.make_world(torch.distributed.HashStore(), 0, 2)
    assert torch.equal(torch.ops.deeptide_test_kernels.early(torch.ones(2)), torch.ones(2))


def overloads(aten, names, meeting, found):
    meeting.wait()
    found.append([getattr(aten, name).default for name in names])


def test_ranks_find_one_object_for_each_operator():
    """Torch keeps a pointer to the first one, and crashes where another one replaced it."""
    deeptide.make_world(torch.distributed.HashStore(), 0, 2)
    full = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    names = [name for name in full if "." not in name and not name.startswith("_")][:400]
    assert len(names) == 400
    aten = _OpNamespace("aten")  # which nobody has asked yet
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found, meeting = [], threading.Barrier(NUM_THREADS)
        threads = [threading.Thread(target=overloads, args=(aten, names, meeting, found)) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == NUM_THREADS
    for others in zip(*found, strict=True):
        assert all(other is others[0] for other in others)
