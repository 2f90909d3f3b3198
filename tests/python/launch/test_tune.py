# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""`deeptide tune` on real jobs: the script stays as it is, the fastest configuration is written and trains."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import deeptide

# A forward takes as long for one sample as for many: the largest micro-batch is the fastest.
SCRIPT = """
import sys, time
import torch
import deeptide

HARD = "--batch" in sys.argv  # its loader has a batch size of its own
batch = int(sys.argv[sys.argv.index("--batch") + 1]) if HARD else 0
MOST = 4 if "most" in sys.argv else 99


class Slow(torch.nn.Module):
    is_gradient_checkpointing = False
    supports_gradient_checkpointing = "switch" in sys.argv

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def gradient_checkpointing_enable(self):
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self):
        self.is_gradient_checkpointing = False

    def forward(self, x):
        time.sleep(0.05)
        if len(x) > MOST and not self.is_gradient_checkpointing:
            raise MemoryError(f"no memory for {len(x)} samples")
        return self.layer(x).square().mean()


config = {
    "train_batch_size": 8 * int(sys.argv[1]),
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "csv_monitor": {"enabled": True, "output_path": "monitored"},
    "autotuning": {"start_profile_step": 2, "end_profile_step": 3},
}
if "mapped" in sys.argv:
    config["autotuning"]["arg_mappings"] = {"train_micro_batch_size_per_gpu": "--batch"}
model = Slow()
data = torch.utils.data.TensorDataset(torch.randn(512, 16))
engine, _, loader, _ = deeptide.initialize(model=model, config=config, training_data=data)
for (x,) in torch.utils.data.DataLoader(data, batch) if HARD else loader:
    engine.backward(engine(x))
    engine.step()
print("micro-batch", engine.train_micro_batch_size_per_gpu(), "x", engine.gradient_accumulation_steps(), flush=True)
"""


def tune(folder, *script, command=("tune",), ranks=1, text=SCRIPT):
    program = shutil.which("deeptide")
    if not program:
        pytest.skip("the deeptide command is not in PATH")
    (folder / "train.py").write_text(text)
    package = os.path.dirname(os.path.dirname(deeptide.__file__))
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    job = ("--num_ranks", str(ranks), "--no_rank_prefix", "--python", sys.executable)
    return subprocess.run(
        [program, *command, *job, "train.py", str(ranks), *script],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def optimal(folder):
    return json.loads((folder / "autotuning_results" / "ds_config_optimal.json").read_text())


@pytest.mark.slow
def test_the_fastest_configuration_is_written_trains_and_is_found_again(tmp_path):
    done = tune(tmp_path, command=("--autotuning", "run"), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    best = optimal(tmp_path)
    assert (best["train_micro_batch_size_per_gpu"], best["gradient_accumulation_steps"]) == (8, 1)
    assert best["train_batch_size"] == 16
    assert best["csv_monitor"]["enabled"] and "autotuning" not in best
    deeptide.Config.from_text(json.dumps(best))
    assert "micro-batch 8 x 1" in done.stdout  # the training
    summary = (tmp_path / "autotuning_results" / "summary.txt").read_text()
    assert summary in done.stdout
    assert [line for line in summary.splitlines() if line.startswith("* ") and " 8 x 1" in line]
    assert (
        "give it autotuning_results/ds_config_optimal.json"
        in (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    )

    results = sorted((tmp_path / "autotuning_exps").glob("*/result.json"))
    before = [path.stat().st_mtime_ns for path in results]
    assert len(results) >= 3
    again = tune(tmp_path, ranks=2)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("measured before") == len(results)
    assert [path.stat().st_mtime_ns for path in results] == before
    assert "micro-batch" not in again.stdout.split("fastest (*)")[1]  # no training


@pytest.mark.costly
def test_trials_leave_the_scripts_monitors_alone(tmp_path):
    assert tune(tmp_path).returncode == 0
    assert not (tmp_path / "monitored").exists()


@pytest.mark.costly
def test_a_run_that_fails_is_in_the_table_and_the_search_goes_on(tmp_path):
    done = tune(tmp_path, "most")
    assert done.returncode == 0, done.stderr
    assert optimal(tmp_path)["train_micro_batch_size_per_gpu"] == 4
    assert "failed: MemoryError: no memory for 8 samples" in done.stdout


@pytest.mark.slow
def test_recomputation_is_turned_on_where_memory_ends_the_way(tmp_path):
    done = tune(tmp_path, "most", "switch", command=("--autotuning", "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: MemoryError: no memory for 8 samples" in done.stdout
    assert "call model.gradient_checkpointing_enable() before initialize" in done.stdout
    assert optimal(tmp_path)["train_micro_batch_size_per_gpu"] == 8
    assert "micro-batch 8 x 1" in done.stdout.split("fastest (*)")[1]  # the training, recomputing
    command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert "model.gradient_checkpointing_enable()" in command


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.slow
def test_a_script_with_its_own_batch_size_is_told_or_gets_it_as_an_argument(tmp_path, mapped):
    done = tune(tmp_path, "--batch", "2", *(["mapped"] if mapped else []))
    assert done.returncode == 0, done.stderr
    assert optimal(tmp_path)["train_micro_batch_size_per_gpu"] == (8 if mapped else 2)
    assert ('name its argument in "arg_mappings"' in done.stdout) != mapped
    if mapped:
        command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
        assert "train.py 1 --batch 8 mapped" in command


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("tune", "--dry-run"), "omit --dry-run"),
        (("--autotuning", "fly"), "--autotuning"),
        (("tune", "--no_python"), "needs a Python script"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, words, text):
    done = tune(tmp_path, command=words)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.costly
def test_a_script_that_fails_before_its_engine_shows_its_own_error(tmp_path):
    done = tune(tmp_path, "--batch")  # without its value
    assert done.returncode == 2
    assert "IndexError" in done.stderr
    assert "the script's first run, which tells its model" in done.stderr


MESHES = """
import sys
import torch
import deeptide

sys.path.insert(0, sys.argv[-1])
from models import batches, make_model

SPECS = [
    {"patterns": [r".*\\.up\\.weight"], "partition_type": "column"},
    {"patterns": [r".*\\.down\\.weight"], "partition_type": "row"},
]
config = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
    "autotuning": {"start_profile_step": 1, "end_profile_step": 2, "num_tuning_micro_batch_sizes": 1},
}
engine = deeptide.initialize(model=make_model(layers=4, tied=False), config=config)[0]


def data():
    while True:
        yield from batches(8, int(engine.train_micro_batch_size_per_gpu()))


steps = data()
for _ in range(6):
    engine.train_batch(steps)
print("mesh", engine.world_size, "micro-batch", engine.train_micro_batch_size_per_gpu(), flush=True)
"""


@pytest.mark.slow
def test_meshes_of_the_ranks_are_tried(tmp_path):
    """Two stages, and two ranks that share layers: both run the script as it is, with the same global batch."""
    done = tune(tmp_path, str(pathlib.Path(__file__).parents[1]), ranks=2, text=MESHES)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "autotuning_results" / "summary.txt").read_text()
    for axis in ("pipeline 2", "tensor 2"):
        rows = [line for line in summary.splitlines() if axis in line]
        assert rows and all("samples/s" not in row and " s" in row and "failed" not in row for row in rows), summary
    assert optimal(tmp_path)["train_batch_size"] == 4
