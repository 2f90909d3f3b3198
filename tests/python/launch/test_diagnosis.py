# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Live jobs seen from outside: Python and native stacks of real ranks, and the doctor on this machine."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from printed import own_line

import deeptide

SCRIPT = """
import os, sys, time
import deeptide
deeptide.init_distributed()

def stuck_here():
    print("ready", flush=True)
    time.sleep(600)

stuck_here()
"""


def environment():
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def command():
    path = shutil.which("deeptide")
    if not path:
        pytest.skip("the deeptide command is not in PATH")
    return path


def ask(command, *arguments):
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=120, env=environment())


@pytest.mark.costly
def test_stacks_of_a_live_job_name_the_line_where_it_stands(command, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = subprocess.Popen(
        [command, "-q", "--num_ranks", "2", "--python", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        for _ in range(2):
            assert "ready" in own_line(job.stdout)
        assert f"{job.pid}\t1\t2\t" in ask(command, "ps").stdout  # on one host, of two ranks
        report = ask(command, "stacks", str(job.pid)).stdout
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=30)
    assert "waiting for no collective" in report
    assert "in stuck_here" in report
    assert f'File "{script}", line 8' in report
    assert "native:" in report
    assert str(job.pid) not in ask(command, "ps").stdout


@pytest.mark.costly
def test_asking_for_stacks_harms_no_rank(command, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import deeptide, time\nprint('ready', flush=True)\ntime.sleep(4)\nprint('done', flush=True)\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\necho ready\nsleep 4\necho done\n")
    (tmp_path / "plain.sh").chmod(0o755)
    for target in (["--python", sys.executable, str(script)], ["--no_python", str(tmp_path / "plain.sh")]):
        job = subprocess.Popen(
            [command, "--num_ranks", "1", *target], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert "ready" in own_line(job.stdout)
        for _ in range(3):
            ask(command, "stacks", str(job.pid))
            time.sleep(0.1)
        output, _ = job.communicate(timeout=30)
        assert job.returncode == 0
        assert "done" in output


@pytest.mark.costly
def test_doctor_finds_torch_and_deeptide(command):
    done = ask(command, "doctor", "--python", sys.executable)
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok    torch: ") for line in lines), done.stdout
    assert any(line.startswith("ok    gloo: ") for line in lines)
    assert any(line.startswith(f"ok    deeptide: {deeptide.__version__}") for line in lines)
    assert any(line.startswith("ok    mpi: ") for line in lines)
    targets = deeptide._C.kernel_targets()
    assert f"ok    kernels of deeptide: optimizer on {targets['optimizer']}, gradient sums on" in done.stdout
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    assert all(". Cure: " in line for line in lines if not line.startswith("ok"))
    assert done.returncode == (1 if any(line.startswith("fail") for line in lines) else 0)


def test_doctor_fails_and_tells_the_cure_if_the_python_has_no_torch(command, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH= exec {os.path.realpath(sys.executable)} -S -E "$@"\n')
    bare.chmod(0o755)
    done = ask(command, "doctor", "--python", str(bare))
    torch_line = next(line for line in done.stdout.splitlines() if " torch: " in line)
    assert torch_line.startswith("fail"), done.stdout
    assert ". Cure: " in torch_line
    assert done.returncode == 1


def test_elastic_command_prints_the_plan(command, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{"elasticity": {"enabled": true, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17],'
        ' "min_gpus": 32, "max_gpus": 1500, "version": 0.1}}'
    )
    done = ask(command, "elastic", "--config", str(path), "-w", "64")
    assert "final_batch_size .... 9792" in done.stdout
    assert "micro_batch_size .... 17" in done.stdout
    assert ask(command, "elastic", "--config", str(path), "-w", "65").returncode != 0
    path.write_text("{}")
    assert "elasticity.enabled is not true" in ask(command, "elastic", "--config", str(path)).stderr
