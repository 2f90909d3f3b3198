# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The two fronts are one engine: the same model, data and configuration print the same losses in C++ and in Python."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deeptide

ROOT = Path(__file__).resolve().parents[3]


def build_folder():
    """The folder of the package under test: beside it stand the launcher and the C++ examples."""
    return Path(deeptide.__file__).absolute().parents[2]


def run(program, config, out, steps=3, more=("--print-losses",)):
    """The losses of each step that the program prints; all that it prints, without --print-losses."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(build_folder() / "python"), environment.get("PYTHONPATH", "")])
    command = [
        build_folder() / "bin" / "deeptide",
        *("--quiet", "--num_ranks", "2", "--python", sys.executable),
        *(program, "--config", ROOT / "examples/gpt" / config, "--out", out, "--threads", "1"),
        *("--steps", str(steps), "--seed", "3", "--eval-every", "1000", "--save-every", "1000", *more),
    ]
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if "--print-losses" not in more:
        return done.stdout
    return [float(value) for value in re.findall(r"step \d+ loss ([0-9.]+)", done.stdout)]


needs_cpp_examples = pytest.mark.skipif(
    not (build_folder() / "examples").exists(), reason="a bundle's build.sh leaves the C++ examples out"
)


# examples/demo.sh asks likewise which one to take: in bf16, a step of the demo's takes a minute where it is emulated.
HAS_BF16 = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text())
IN_FP32 = pytest.param("ds_config_fp32.json", marks=[pytest.mark.slow] if HAS_BF16 else [])
IN_BF16 = pytest.param(
    "ds_config.json", marks=pytest.mark.skipif(not HAS_BF16, reason="this processor emulates bf16, slowly")
)


@pytest.mark.costly
@needs_cpp_examples
@pytest.mark.parametrize("config", [IN_FP32, IN_BF16])
def test_cpp_and_python_print_the_same_losses(config, tmp_path):
    python = run(ROOT / "examples/gpt/gpt.py", config, tmp_path / "python")
    cpp = run(build_folder() / "examples/gpt/gpt", config, tmp_path / "cpp")
    assert len(python) == 3
    assert cpp == pytest.approx(python, abs=1e-5)


@pytest.mark.slow
def test_demos_report_says_how_its_sample_was_asked_for(tmp_path):
    """A model of two steps writes noise. A run that has ended goes on with the sample's line in its file."""
    printed = run(ROOT / "examples/gpt/gpt.py", "ds_config_fp32.json", tmp_path, 2, more=())
    *_, sample = (json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines())
    assert sample["step"] == 2 and sample["prompt"] == "\n    def " and 0 < sample["temperature"] < 1
    assert sample["sample"].startswith(sample["prompt"]) and len(sample["sample"]) >= 400
    written = sample["sample"].removeprefix(sample["prompt"])
    assert sample["nonblank"] == round(len("".join(written.split())) / len(written), 3)
    assert f'Prompted with "def", at temperature {sample["temperature"]:g}, it writes:\n  |     def ' in printed
    code = "import report, pathlib, sys; r = report.Run(1, 1, 3, '', 1, 4); p = pathlib.Path(sys.argv[1])"
    code += "; report.Report(r, p, start=2, rank=0, print_losses=True)"
    code += "; assert report.lines_of(b'\\n    def f():\\n\\n' + b' ' * 90) == ['    def f():']"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT / "examples" / "gpt", check=True, timeout=60)
    assert json.loads((tmp_path / "losses.jsonl").read_text().splitlines()[-1]) == sample


@needs_cpp_examples
@pytest.mark.slow
def test_quickstart_trains(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(build_folder() / "python"), "OMP_NUM_THREADS": "1"}
    launcher = build_folder() / "bin" / "deeptide"
    for program in (ROOT / "examples/quickstart.py", build_folder() / "examples/quickstart"):
        command = [launcher, "--quiet", "--num_ranks", "2", "--python", sys.executable, program]
        done = subprocess.run(
            [str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert done.stdout.strip()


@pytest.mark.slow
def test_cnn_learns_to_tell_shapes_apart():
    environment = {**os.environ, "PYTHONPATH": str(build_folder() / "python"), "OMP_NUM_THREADS": "1"}
    command = [build_folder() / "bin" / "deeptide", "--quiet", "--num_ranks", "2", "--python", sys.executable]
    command += [ROOT / "examples/cnn/cnn.py", "--epochs", "3", "--pictures", "1024"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shares = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    assert len(shares) == 3
    assert shares[-1] > 30  # one of ten by guessing


def large(files, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(build_folder() / "python"), "OMP_NUM_THREADS": "1"}
    command = [build_folder() / "bin" / "deeptide", "--quiet", "--num_ranks", "2", "--python", sys.executable]
    command += [ROOT / "examples/gpt/large.py", "--size", "20M", "--steps", "2", "--files", files, *arguments]
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, re.findall(r"step \d/2  loss ([0-9.]+)", done.stdout)


@pytest.mark.slow
def test_a_model_whose_state_lies_in_files_learns_as_one_in_memory(tmp_path):
    in_files, losses = large(tmp_path)
    assert len(losses) == 2
    assert re.search(r"in files: parameters [\d.]+, gradients [\d.]+, optimizer states [\d.]+ GiB", in_files), in_files
    assert large(tmp_path, "--in-memory")[1] == losses
    assert list(tmp_path.iterdir()) == []
