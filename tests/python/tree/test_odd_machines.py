# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The tests themselves run where a system call is denied, and see no GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deeptide
import deeptide.comm

_DENIED = """
import errno, os
def denied(*_):
    raise OSError(errno.EINVAL, "Invalid argument")
os.sched_setscheduler = denied
import conftest
"""


@pytest.mark.costly
def test_one_scheduling_policy_is_enough_for_the_tests():
    folder = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(deeptide.__file__)))}
    done = subprocess.run(
        [sys.executable, "-c", _DENIED],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("DEEPTIDE_TEST_ACCELERATOR" in os.environ, reason="a GPU is what these tests are for")
def test_tests_on_the_cpu_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("nccl", "cuda"), ("gloo", "cpu"), ("cuda:nccl,cpu:gloo", "cuda"), ("cpu:gloo,sim:simulated", "sim")],
)
def test_a_mesh_is_of_the_device_that_the_default_group_serves(backend, kind):
    assert deeptide.comm._device_kind(backend) == kind
