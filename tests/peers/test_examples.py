# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The examples that need libraries run under the launcher, learn and save."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deeptide

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["trainer_lora.py", "accelerate_lora.py"])
def test_llama_learns_under_the_launcher(script, tmp_path):
    launcher = Path(deeptide.__file__).absolute().parents[2] / "bin" / "deeptide"
    command = [launcher, "--quiet", "--as-deepspeed", "--num_ranks", "2", "--python", sys.executable]
    command += [ROOT / "examples" / "llama" / script, "--steps", "12", "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", done.stdout).groups())
    assert last < first - 0.5  # from ln 256 = 5.5; without learning both are the same but for the batch
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_lightning_learns_to_tell_shapes_apart(tmp_path):
    package = Path(deeptide.__file__).absolute().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    command = [sys.executable, ROOT / "examples" / "cnn" / "lightning_cnn.py", "--epochs", "3", "--pictures", "1024"]
    command += ["--out", tmp_path]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1]) > 30  # one of ten by guessing
    assert (tmp_path / "best.ckpt").is_dir()
