# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""A torch of another minor version is answered before its symbols are missed."""

import subprocess
import sys

import pytest
import torch

from deeptide import _version

ANSWER = "this deeptide was built for torch 1.99 and finds torch "


@pytest.mark.costly
@pytest.mark.parametrize(
    "use", ["import deeptide; deeptide.Config", "from deeptide import initialize", "import deeptide.engine"]
)
def test_another_torch_is_named(use):
    pretend = "import deeptide; deeptide.TORCH_VERSION = '1.99.0'; "
    done = subprocess.run([sys.executable, "-c", pretend + use], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {ANSWER}{torch.__version__}: install torch==1.99.*, or build"), done.stderr


def test_the_torch_it_was_built_for_is_recorded():
    assert torch.__version__.startswith(_version.TORCH_VERSION)
