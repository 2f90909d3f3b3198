# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on hosts that share no folder, over the network between them: saved, resumed, resharded."""

import json
import os
import re
from pathlib import Path

import pytest

deeptide = pytest.importorskip("deeptide")
PACKAGES = Path(deeptide.__file__).absolute().parents[1]
TRAIN = """
import hashlib, json, os, socket, sys
import torch
import deeptide

def own_address(other):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return probe.getsockname()[0]

torch.manual_seed(0)
torch.set_num_threads(1)
root, other, how, stage, first, last = *sys.argv[1:4], *map(int, sys.argv[4:])
folder = os.path.join(root, own_address(other))
config = {"train_micro_batch_size_per_gpu": 12 // int(os.environ["WORLD_SIZE"]),
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
          "checkpoint": {"use_node_local_storage": True, "async": how == "beside"}}
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
engine, *_ = deeptide.initialize(model=model, config=config)
if first > 0:
    engine.load_checkpoint(folder)
    assert engine.global_steps == first

def digest():
    names = [name for name, _ in engine.module.named_parameters()]
    states = [engine._core.full_state(name, role) for name in names for role in ("master", "exp_avg", "exp_avg_sq")]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()

before, losses = digest(), []
for step in range(first, last):
    batch = torch.randn(12, 40, generator=torch.Generator().manual_seed(step))
    loss = engine(batch[engine.global_rank :: engine.world.size]).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if step == 1:
        engine.save_checkpoint(folder)
engine.wait_for_save()
print(json.dumps({"rank": engine.global_rank, "before": before, "losses": losses, "folder": folder}))
engine.destroy()
"""


def run(hosts, how, stage, first, last, slots):
    root = hosts.folder / "drives"
    words = [*hosts.python("train.py", TRAIN), str(root), hosts.head.address, how, str(stage), str(first), str(last)]
    job = hosts.run(*words, slots=slots, env={"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}, timeout=240)
    assert job.code == 0, job.output[-2000:] + job.errors[-3000:]
    told = [json.loads(text) for text in re.findall(r"\{.*\}", job.output)]
    assert len(told) == sum(slots)
    return sorted(told, key=lambda line: line["rank"])


@pytest.mark.rotates
@pytest.mark.parametrize(("how", "stage"), [("blocking", 1), ("beside", 3)])
def test_a_run_goes_on_from_the_drives_of_its_hosts(hosts, how, stage):
    straight = run(hosts, how, stage, 0, 4, (2, 2))
    folders = sorted({line["folder"] for line in straight})
    assert len(folders) == 2
    for folder in folders:
        names = sorted(os.listdir(f"{folder}/global_step2"))
        assert names[0] == "manifest.json" and len(names) == 3, names
    resumed = run(hosts, how, stage, 2, 4, (2, 2))
    assert [line["losses"] for line in resumed] == [line["losses"][2:] for line in straight]
    # Fewer ranks, of which each lacks half of what it needs; and one host alone cannot have the other's files.
    fewer = run(hosts, how, stage, 2, 3, (1, 1))
    assert {line["before"] for line in fewer} == {resumed[0]["before"]}
    hosts.expect_nothing_left()
