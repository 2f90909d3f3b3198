# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""The losses of 100 steps beside those of DeepSpeed 0.19.8 itself, from one ds_config: same weights, same data.

Not here: LAMB and fp16, which DeepSpeed does not have on a CPU.
"""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import deeptide

THEIRS = Path(__file__).parents[3] / ".venv-peers-deepspeed"
OPTIMIZERS = {
    "Adam": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "AdamW": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
    "Lion": {"lr": 3e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "Adagrad": {"lr": 3e-2},
}
OFFLOADED = {"Lion", "Adagrad"}  # DeepSpeed's own kernels for a CPU step what is offloaded
CASES = [
    (type, bf16, gas, clipping)
    for type in OPTIMIZERS
    for bf16, gas, clipping in [(False, 1, 0.0), (False, 4, 0.5), (True, 1, 0.5), (True, 4, 0.0)]
]


HALF = {  # torch_autocast in float16, which scales its losses: {name: (stage, clipping)}
    "half-0-0.5": (0, 0.5),
    "half-2-0": (2, 0.0),
    "half-2-0.5": (2, 0.5),
}


def half_config(stage, clipping):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clipping,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]},
    }


def name_of(type, bf16, gas, clipping):
    return f"{type}-{'bf16' if bf16 else 'fp32'}-{gas}-{clipping:g}"


def config_of(type, bf16, gas, clipping, theirs):
    zero = {"stage": 2}
    if theirs and type in OFFLOADED:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clipping,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "optimizer": {"type": type, "params": OPTIMIZERS[type]},
    }


def train(framework, python, folder):
    """Runs two ranks under all configurations; returns their losses by case."""
    cases, out = folder / f"{framework}-cases.json", folder / f"{framework}.json"
    configs = {name_of(*case): config_of(*case, framework == "deepspeed") for case in CASES}
    configs.update({name: half_config(*case) for name, case in HALF.items()})
    cases.write_text(json.dumps(configs))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(deeptide.__file__).absolute().parents[1]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(THEIRS / "torch_extensions"),
    }
    words = [python, Path(__file__).parent / "deepspeed_rank.py", framework, cases, out]
    ranks = []
    for rank in range(2):
        with (folder / f"{framework}-{rank}.log").open("w") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, env=own, cwd=folder))
    try:
        codes = [rank.wait(timeout=1800) for rank in ranks]  # DeepSpeed compiles its operators the first time
    finally:
        for rank in ranks:
            rank.kill()
    if codes != [0, 0]:
        logs = [(folder / f"{framework}-{rank}.log").read_text()[-3000:] for rank in range(2)]
        pytest.fail(f"{framework} ended with {codes}:\n" + "\n".join(logs))
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """(theirs, ours), by case."""
    if not (THEIRS / "bin" / "python").exists():
        pytest.skip(f"there is no {THEIRS.name}: tests/peers/run.sh makes it")
    folder = tmp_path_factory.mktemp("deepspeed")
    ours = train("deeptide", sys.executable, folder)
    return train("deepspeed", THEIRS / "bin" / "python", folder), ours


@pytest.mark.parametrize(("type", "bf16", "gas", "clipping"), CASES)
def test_losses_of_100_steps_are_deepspeeds(losses, type, bf16, gas, clipping):
    theirs, ours = (side[name_of(type, bf16, gas, clipping)] for side in losses)
    assert len(ours) == len(theirs) == 100
    assert min(ours) < 0.85 * ours[0]
    # fp32: sums in another order (2e-5 was seen). bf16: DeepSpeed sums in bf16, Deeptide in fp32 (2e-3 was seen).
    tolerance = 1e-2 if bf16 else 1e-4
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert math.isclose(one, other, rel_tol=tolerance), f"step {step}: {one}, DeepSpeed {other}"


@pytest.mark.parametrize("name", ["half-0-0.5", "half-2-0"])
def test_losses_under_autocast_in_float16_are_deepspeeds(losses, name):
    theirs, ours = (side[name] for side in losses)
    assert min(ours) < 0.85 * ours[0]
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):  # 2e-4 was seen
        assert math.isclose(one, other, rel_tol=2e-3), f"step {step}: {one}, DeepSpeed {other}"


def test_deepspeed_clips_scaled_gradients_under_autocast_in_float16(losses):
    """At stages 1 to 3 (docs/architecture/differences.md): here clipping means the same at every stage."""
    theirs, ours = losses
    farthest = max(
        abs(one - other) / other for one, other in zip(theirs["half-2-0.5"], ours["half-2-0.5"], strict=True)
    )
    assert farthest > 0.03, "it does not any more: take the row out of the table of differences"
    for one, other in zip(ours["half-2-0.5"], ours["half-0-0.5"], strict=True):
        assert math.isclose(one, other, rel_tol=2e-3)
