# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""nvcc makes accesses of 16 bytes and no stack of the kernels of step and sum. Needs nvcc alone; nothing runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {"step": ROOT / "src/optim/updates/step_kernel.cu", "sum": ROOT / "src/numerics/sums/sum_kernel.cu"}
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
NVCC, PTXAS = (shutil.which(name) or shutil.which(str(CUDA / name)) for name in ("nvcc", "ptxas"))
FLAGS = ("-O3", "-std=c++20", "--fmad=false", "-arch=sm_90", f"-I{ROOT / 'src'}")
# Accesses of a packet of eight: two in fp32, one in 16 bits. The types' numbers are NumberType's: 0 is fp32.
STEP = re.compile(r"PacketBodyILi(?P<states>\d).*?NumberTypeE(?P<gradient>\d)ELS\w*?_(?P<param>\d)E")
# `into` is Into's number: 0 has no sums, 1 overwrites, 2 adds.
SUM = re.compile(r"QuarterBodyILN\w*?NumberTypeE(?P<row>\d)ELi(?P<count>\d)ELN\w*?IntoE(?P<into>\d)E")


def said(*words):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def compiled(name, folder):
    """By each kernel's name: the PTX, and what ptxas says of it."""
    ptx, code = folder / f"{name}.ptx", folder / f"{name}.cubin"
    said(NVCC, *FLAGS, "-ptx", "-o", ptx, SOURCES[name])
    reports = re.split(r"Compiling entry function '", said(PTXAS, "-arch=sm_90", "-v", "-o", code, ptx))[1:]
    of_kernel = {report.partition("'")[0]: report for report in reports}
    texts = re.split(r"\.entry ", ptx.read_text())[1:]
    return {text.partition("(")[0].strip(): (text, of_kernel[text.partition("(")[0].strip()]) for text in texts}


def check(name, text, report, loads, stores):
    """`loads`, `stores`: accesses of a packet; more where the compiler has a loop for each branch."""
    for kind, least in (("ld", loads), ("st", stores)):
        quads = len(re.findall(rf"{kind}\.global\S*\.v4\.", text))
        assert quads >= least, (name, kind)
        assert quads == 0 if least == 0 else quads % least == 0, (name, kind, quads)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (name, report)


needs_nvcc = pytest.mark.skipif(
    not (NVCC and PTXAS and SOURCES["step"].exists()), reason="nvcc, or the sources, are not here"
)


@needs_nvcc
@pytest.mark.slow
def test_a_step_is_of_accesses_of_16_bytes_and_needs_no_stack(tmp_path):
    seen = set()
    for name, (text, report) in compiled("step", tmp_path).items():
        found = STEP.search(name)
        if not found:
            continue
        states, gradient, param = (int(found[group]) for group in ("states", "gradient", "param"))
        loads = (2 if gradient == 0 else 1) + 2 + 2 * states
        check(name, text, report, loads, 2 + 2 * states + (0 if param == 0 else 1))
        seen.add((states, gradient, param))
    types = {(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)}
    assert seen == {(states, *pair) for states in range(4) for pair in types}


@needs_nvcc
@pytest.mark.slow
def test_a_sum_is_of_accesses_of_16_bytes_and_needs_no_stack(tmp_path):
    seen = set()
    for name, (text, report) in compiled("sum", tmp_path).items():
        found = SUM.search(name)
        if not found:
            continue
        row, count, into = (int(found[group]) for group in ("row", "count", "into"))
        loads = count * (2 if row == 0 else 1) + (2 if into == 2 else 0)
        check(name, text, report, loads, 0 if into == 0 else 2)
        seen.add((row, count, into))
    assert seen == {(row, count, into) for row in range(3) for count in (1, 2, 4, 8) for into in range(3)}
