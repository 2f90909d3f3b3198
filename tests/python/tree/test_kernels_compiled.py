# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""nvcc makes accesses of 16 bytes and no stack of the kernels of step, LAMB and sum. Needs nvcc alone; nothing runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {
    "step": ROOT / "src/optim/kernels/step_kernel.cu",
    "lamb": ROOT / "src/optim/kernels/lamb_kernel.cu",
    "sum": ROOT / "src/numerics/sums/sum_kernel.cu",
}
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
NVCC, PTXAS = (shutil.which(name) or shutil.which(str(CUDA / name)) for name in ("nvcc", "ptxas"))
FLAGS = ("-O3", "-std=c++20", "--fmad=false", "-arch=sm_90", f"-I{ROOT / 'src'}")
# Accesses of a packet of eight: two in fp32, one in 16 bits. The types' numbers are NumberType's: 0 is fp32.
STEP = re.compile(
    r"PacketBodyILi(?P<states>\d).*?NumberTypeE(?P<gradient>\d)ELS\w*?_(?P<param>\d)E\w*?(?P<pieces>OneRow|InPieces)"
)
NARROW = re.compile(  # where masters are packed or states have 16 bits
    r"NarrowBodyILi(?P<states>\d).*?NumberTypeE(?P<gradient>\d)E\w*?(?P<master>Whole|Packed)Master"
)
LAMB = re.compile(r"Lamb(?:MeasureILN\w*?NumberTypeE(?P<gradient>\d)E|Apply)")
# `into` is Into's number: 0 has no sums, 1 overwrites, 2 adds.
PIECES = re.compile(r"PiecesBodyILN\w*?NumberTypeE(?P<row>\d)E")  # squares of gradients where autograd left them
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
    seen, narrow = set(), set()
    for name, (text, report) in compiled("step", tmp_path).items():
        if of_narrow := NARROW.search(name):
            states, gradient = int(of_narrow["states"]), int(of_narrow["gradient"])
            is_whole = of_narrow["master"] == "Whole"
            of_states = states * 3  # two in fp32 or one in 16 bits
            check(name, text, report, (2 if gradient == 0 else 1) + 2 + of_states, (3 if is_whole else 2) + of_states)
            narrow.add((states, gradient, of_narrow["master"]))
        found = STEP.search(name)
        if not found:
            continue
        states, gradient, param = (int(found[group]) for group in ("states", "gradient", "param"))
        loads = (2 if gradient == 0 else 1) + 2 + 2 * states
        check(name, text, report, loads, 2 + 2 * states + (0 if param == 0 else 1))
        seen.add((states, gradient, param, found["pieces"]))
    types = {(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)}
    assert seen == {(n, *pair, pieces) for n in range(4) for pair in types for pieces in ("OneRow", "InPieces")}
    assert narrow == {(n, gradient, master) for n in range(4) for gradient in (0, 1) for master in ("Whole", "Packed")}


@needs_nvcc
@pytest.mark.slow
def test_passes_of_lamb_are_of_accesses_of_16_bytes_and_need_no_stack(tmp_path):
    seen = set()
    for name, (text, report) in compiled("lamb", tmp_path).items():
        gradient = LAMB.search(name)["gradient"]
        loads, stores = {None: (6, 3), "0": (8, 6)}.get(gradient, (7, 6))  # None: the second pass
        check(name, text, report, loads, stores)
        seen.add(gradient)
    assert seen == {None, "0", "1", "2"}


@needs_nvcc
@pytest.mark.slow
def test_a_sum_is_of_accesses_of_16_bytes_and_needs_no_stack(tmp_path):
    seen, in_pieces = set(), set()
    for name, (text, report) in compiled("sum", tmp_path).items():
        if of_pieces := PIECES.search(name):
            check(name, text, report, 2 if of_pieces["row"] == "0" else 1, 0)
            in_pieces.add(int(of_pieces["row"]))
        found = SUM.search(name)
        if not found:
            continue
        row, count, into = (int(found[group]) for group in ("row", "count", "into"))
        loads = count * (2 if row == 0 else 1) + (2 if into == 2 else 0)
        check(name, text, report, loads, 0 if into == 0 else 2)
        seen.add((row, count, into))
    assert seen == {(row, count, into) for row in range(3) for count in (1, 2, 4, 8) for into in range(3)}
    assert in_pieces == {0, 1, 2}


# -- AMD: clang with HIP's headers and device libraries, as Debian has them --------------------------------------------

ROCM = Path(os.environ.get("ROCM_PATH", "/usr"))
CLANG = shutil.which("clang++-19") or shutil.which("clang++")
_PLACES = (ROCM / folder / "amdgcn/bitcode/ockl.bc" for folder in (".", "lib", "lib/x86_64-linux-gnu"))
BITCODE = next((place for place in _PLACES if place.exists()), None)
HIP = ("-x", "hip", "--offload-arch=gfx90a", "--cuda-device-only", "-D__HIP_PLATFORM_AMD__", "-S")


def compiled_for_amd(name, folder):
    """Assembly, and by each kernel's name the bytes of its stack."""
    source = SOURCES[name].relative_to(ROOT / "src")
    said(sys.executable, ROOT / "tools/hipify.py", ROOT / "src", source, folder, folder / "made.o")
    libraries = ("--rocm-path=" + str(ROCM), "--rocm-device-lib-path=" + str(BITCODE.parent))
    flags = ("-O3", "-std=c++20", "-ffp-contract=off", *libraries, f"-I{ROCM / 'include'}", f"-I{folder}")
    said(CLANG, *HIP, *flags, "-o", folder / "made.s", folder / source.with_suffix(".hip"))
    text = (folder / "made.s").read_text()
    stacks = re.findall(r"\.name: +(\S+)\n(?:.*\n)*?.*\.private_segment_fixed_size: (\d+)", text)
    return text, {kernel: int(stack) for kernel, stack in stacks}


@pytest.mark.skipif(
    not (CLANG and BITCODE and (ROCM / "include/hip/hip_runtime.h").exists() and SOURCES["step"].exists()),
    reason="clang with HIP's headers and device libraries, or the sources, are not here",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile_for_amd_without_a_stack(name, tmp_path):
    """Waves of 64: groups of 32 lanes meet in shared memory, whatever a wave is. No atomics, no type of CUDA's."""
    text, stacks = compiled_for_amd(name, tmp_path / "hip")
    in_packets = (STEP, NARROW, LAMB, SUM, PIECES)
    packets = {kernel: stack for kernel, stack in stacks.items() if any(kind.search(kernel) for kind in in_packets)}
    assert len(packets) == {"step": 140, "lamb": 4, "sum": 39}[name], packets.keys()
    assert set(packets.values()) == {0}
    assert ".wavefront_size: 64" in text
    assert re.search(r"(global|flat)_load_dwordx4", text) and re.search(r"(global|flat)_store_dwordx4", text)
