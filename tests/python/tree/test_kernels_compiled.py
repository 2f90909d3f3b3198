# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the step's kernels: accesses of 16 bytes, no stack. Needs nvcc alone; nothing runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "optim" / "step_kernel.cu"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
NVCC, PTXAS = (shutil.which(name) or shutil.which(str(CUDA / name)) for name in ("nvcc", "ptxas"))
FLAGS = ("-O3", "-std=c++20", "--fmad=false", "-arch=sm_90", f"-I{ROOT / 'src'}")
# Of a packet of eight: fp32 takes two accesses, 16 bits take one. The types' numbers are NumberType's: 0 is fp32.
KERNEL = re.compile(r"PacketBodyILi(?P<states>\d).*?NumberTypeE(?P<gradient>\d)ELS\w*?_(?P<param>\d)E")


def said(*words):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of each kernel by its name: the PTX, and what ptxas says of it."""
    folder = tmp_path_factory.mktemp("kernels")
    ptx, code = folder / "step.ptx", folder / "step.cubin"
    said(NVCC, *FLAGS, "-ptx", "-o", ptx, SOURCE)
    reports = re.split(r"Compiling entry function '", said(PTXAS, "-arch=sm_90", "-v", "-o", code, ptx))[1:]
    of_kernel = {report.partition("'")[0]: report for report in reports}
    texts = re.split(r"\.entry ", ptx.read_text())[1:]
    return {text.partition("(")[0].strip(): (text, of_kernel[text.partition("(")[0].strip()]) for text in texts}


@pytest.mark.skipif(not (NVCC and PTXAS and SOURCE.exists()), reason="nvcc is not here")
def test_packets_are_accesses_of_16_bytes_and_need_no_stack(compiled):
    seen = set()
    for name, (text, report) in compiled.items():
        found = KERNEL.search(name)
        if not found:
            continue
        states, gradient, param = (int(found[group]) for group in ("states", "gradient", "param"))
        loads = (2 if gradient == 0 else 1) + 2 + 2 * states
        stores = 2 + 2 * states + (0 if param == 0 else 1)
        # More where the compiler has made a loop of its own for each of a rule's branches.
        for kind, least in (("ld", loads), ("st", stores)):
            quads = len(re.findall(rf"{kind}\.global\S*\.v4\.", text))
            assert quads >= least, (name, kind)
            assert quads % least == 0, (name, kind, quads)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (name, report)
        seen.add((states, gradient, param))
    types = {(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)}
    assert seen == {(states, *pair) for states in range(4) for pair in types}
